package awssnssqs

// Go Cloud's conformance tests, on a queue of the server that the environment names.

import (
	"context"
	"testing"

	"github.com/aws/aws-sdk-go-v2/config"
	"github.com/aws/aws-sdk-go-v2/service/sqs"
	"gocloud.dev/pubsub/drivertest"
)

func TestConformancePenstock(t *testing.T) {
	newHarness := func(ctx context.Context, t *testing.T) (drivertest.Harness, error) {
		settings, err := config.LoadDefaultConfig(ctx)
		if err != nil {
			return nil, err
		}
		client := sqs.NewFromConfig(settings)
		return &harness{sqsClient: client, topicKind: topicKindSQS, closer: func() {}}, nil
	}
	asTests := []drivertest.AsTest{awsAsTest{topicKind: topicKindSQS}}
	drivertest.RunConformanceTests(t, newHarness, asTests)
}
