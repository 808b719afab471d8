module bento

go 1.26

require github.com/warpstreamlabs/bento v1.20.0
