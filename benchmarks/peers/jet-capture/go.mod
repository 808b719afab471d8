module jet-capture

go 1.22

require (
	github.com/Intelecy/jet-capture v0.2.5
	github.com/nats-io/nats.go v1.34.0
	go.uber.org/zap v1.23.0
)
