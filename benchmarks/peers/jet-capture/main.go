// jet-capture as its README shows it: JSON into a struct, grouped by a field, CSV on the local file system.
//
// What is chosen for it, because it is the fastest for it: blocks in memory (its default), no compression (its
// default), and blocks that end by their number of messages, so that it never waits for a clock. Its blocks else end
// only when a later message comes, so it is told how many messages there are: with the last one it is cancelled,
// upon which it stores and acknowledges everything at once.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log"
	"path/filepath"
	"strconv"
	"time"

	jetcapture "github.com/Intelecy/jet-capture"
	"github.com/nats-io/nats.go"
	"go.uber.org/zap"
)

// Order is a message of the benchmark.
type Order struct {
	ID        int64   `json:"order_id"`
	Region    string  `json:"region"`
	Amount    float64 `json:"amount"`
	CreatedAt string  `json:"created_at"`
	Item      string  `json:"item"`
}

func main() {
	url := flag.String("url", "", "where NATS is")
	stream := flag.String("stream", "", "the stream")
	consumer := flag.String("consumer", "", "its durable consumer")
	output := flag.String("output", "", "a directory")
	messages := flag.Int("messages", 0, "how many messages there are")
	block := flag.Int("block", 0, "messages of a block")
	flag.Parse()

	jetcapture.SetDefaultLogger(zap.NewNop())
	client, err := nats.Connect(*url)
	if err != nil {
		log.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()

	seen := 0
	options := jetcapture.DefaultOptions[*Order, string]()
	options.NATSStreamName = *stream
	options.NATSConsumerName = *consumer
	options.Suffix = "csv"
	options.MaxAge = 24 * time.Hour
	options.MaxMessages = *block
	options.MessageDecoder = func(msg *nats.Msg) (*Order, string, error) {
		if seen++; seen == *messages {
			cancel()
		}
		var order Order
		if err := json.Unmarshal(msg.Data, &order); err != nil {
			return nil, "", err
		}
		return &order, order.Region, nil
	}
	options.WriterFactory = func() jetcapture.FormattedDataWriter[*Order] {
		return jetcapture.NewCSVWriter([]string{"order_id", "region", "amount", "created_at", "item"}, row)
	}
	options.Store = &jetcapture.LocalFSStore[string]{
		Resolver: func(region string) (string, error) { return filepath.Join(*output, region), nil },
	}
	if err := options.Build().Run(ctx, client); err != nil && !errors.Is(err, context.Canceled) {
		log.Fatal(err)
	}
	if seen != *messages {
		log.Fatal(fmt.Sprintf("%d messages instead of %d", seen, *messages))
	}
}

func row(order *Order) ([][]string, error) {
	return [][]string{{
		strconv.FormatInt(order.ID, 10),
		order.Region,
		strconv.FormatFloat(order.Amount, 'f', -1, 64),
		order.CreatedAt,
		order.Item,
	}}, nil
}
