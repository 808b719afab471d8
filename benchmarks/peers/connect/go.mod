module connect

go 1.24

require github.com/redpanda-data/connect/v4 v4.45.0

replace github.com/99designs/keyring => github.com/Jeffail/keyring v1.2.3
