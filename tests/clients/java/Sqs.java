// The AWS SDK for Java v2 against the server that the environment names: each check is a line of output.

import java.net.URI;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import software.amazon.awssdk.core.SdkBytes;
import software.amazon.awssdk.services.sqs.SqsAsyncClient;
import software.amazon.awssdk.services.sqs.SqsClient;
import software.amazon.awssdk.services.sqs.model.*;

public class Sqs {
    static final URI ENDPOINT = URI.create(System.getenv("AWS_ENDPOINT_URL"));
    static final String PREFIX = System.getenv("QUEUE_PREFIX");
    static int number;

    interface Check {
        void run() throws Exception;
    }

    static void check(String name, Check work) throws Exception {
        work.run();
        System.out.println("ok " + name);
    }

    static void same(Object found, Object expected) {
        if (!expected.equals(found)) {
            throw new AssertionError("found " + found + ", expected " + expected);
        }
    }

    static String queue(SqsClient sqs, String begin, String end, Map<QueueAttributeName, String> attributes) {
        String name = begin + PREFIX + "-java-" + ++number + end;
        return sqs.createQueue(each -> each.queueName(name).attributes(attributes)).queueUrl();
    }

    static List<Message> receive(SqsClient sqs, String url, int waitSeconds) {
        return sqs.receiveMessage(each -> each.queueUrl(url).maxNumberOfMessages(10).waitTimeSeconds(waitSeconds)
            .messageAttributeNames("All").messageSystemAttributeNames(MessageSystemAttributeName.ALL)).messages();
    }

    public static void main(String[] arguments) throws Exception {
        try (SqsClient sqs = SqsClient.builder().endpointOverride(ENDPOINT).build();
             SqsAsyncClient later = SqsAsyncClient.builder().endpointOverride(ENDPOINT).build()) {
            // The SDK compares the digests of bodies and attributes by itself.
            check("a message comes back as it was sent", () -> {
                String url = queue(sqs, "", "", Map.of());
                Map<String, MessageAttributeValue> sent = new HashMap<>();
                sent.put("text", MessageAttributeValue.builder().dataType("String").stringValue("grün").build());
                sent.put("number", MessageAttributeValue.builder().dataType("Number").stringValue("1.5").build());
                sent.put("bytes", MessageAttributeValue.builder().dataType("Binary")
                    .binaryValue(SdkBytes.fromByteArray(new byte[] {0, 1, -1})).build());
                sqs.sendMessage(each -> each.queueUrl(url).messageBody("ein Wort").messageAttributes(sent));
                Message got = receive(sqs, url, 5).get(0);
                same(got.body(), "ein Wort");
                same(got.messageAttributes(), sent);
                same(got.attributes().get(MessageSystemAttributeName.APPROXIMATE_RECEIVE_COUNT), "1");
                sqs.deleteMessage(each -> each.queueUrl(url).receiptHandle(got.receiptHandle()));
                same(receive(sqs, url, 0).size(), 0);
            });
            check("a slow consumer gets rid of its message", () -> {
                String url = queue(sqs, "", "", Map.of(QueueAttributeName.VISIBILITY_TIMEOUT, "1"));
                sqs.sendMessage(each -> each.queueUrl(url).messageBody("slow"));
                String handle = receive(sqs, url, 5).get(0).receiptHandle();
                Thread.sleep(1_500);
                sqs.deleteMessage(each -> each.queueUrl(url).receiptHandle(handle));
                same(receive(sqs, url, 0).size(), 0);
            });
            check("a batch names the handle of a message that is gone", () -> {
                String url = queue(sqs, "", "", Map.of());
                sqs.sendMessageBatch(batch -> batch.queueUrl(url).entries(
                    each -> each.id("a").messageBody("1"), each -> each.id("b").messageBody("2")));
                List<Message> got = receive(sqs, url, 5);
                same(got.size(), 2);
                String gone = got.get(0).receiptHandle();
                sqs.deleteMessageBatch(batch -> batch.queueUrl(url).entries(
                    each -> each.id("a").receiptHandle(gone)));
                ChangeMessageVisibilityBatchResponse changed = sqs.changeMessageVisibilityBatch(
                    batch -> batch.queueUrl(url).entries(
                        each -> each.id("a").receiptHandle(gone).visibilityTimeout(0),
                        each -> each.id("b").receiptHandle(got.get(1).receiptHandle()).visibilityTimeout(0)));
                same(changed.failed().get(0).code(), "ReceiptHandleIsInvalid");
                same(changed.successful().get(0).id(), "b");
                same(receive(sqs, url, 5).size(), 1);
            });
            check("a FIFO queue keeps its order and knows duplicates", () -> {
                String url = queue(sqs, "", ".fifo", Map.of(QueueAttributeName.FIFO_QUEUE, "true"));
                for (String id : List.of("1", "2", "2", "3")) {
                    sqs.sendMessage(each -> each.queueUrl(url).messageBody(id).messageGroupId("g")
                        .messageDeduplicationId(id));
                }
                same(receive(sqs, url, 5).stream().map(Message::body).toList(), List.of("1", "2", "3"));
            });
            check("a name may begin as those of the client of temporary queues", () -> {
                String url = queue(sqs, "__RequesterClientQueues__", "", Map.of());
                sqs.sendMessage(each -> each.queueUrl(url).messageBody("x"));
                same(receive(sqs, url, 5).size(), 1);
            });
            check("errors have their types", () -> {
                try {
                    sqs.getQueueUrl(each -> each.queueName(PREFIX + "-none"));
                    throw new AssertionError("there is no such queue");
                } catch (QueueDoesNotExistException error) {
                    same(error.awsErrorDetails().errorCode(), "AWS.SimpleQueueService.NonExistentQueue");
                }
            });
            check("the asynchronous client waits for a message", () -> {
                String url = queue(sqs, "", "", Map.of());
                var waiting = later.receiveMessage(each -> each.queueUrl(url).waitTimeSeconds(20));
                later.sendMessage(each -> each.queueUrl(url).messageBody("soon")).join();
                same(waiting.join().messages().get(0).body(), "soon");
            });
            check("the SDK's own batches of single calls", () -> {
                String url = queue(sqs, "", "", Map.of());
                try (var batches = later.batchManager()) {
                    var sent = java.util.stream.IntStream.range(0, 25).mapToObj(at ->
                        batches.sendMessage(each -> each.queueUrl(url).messageBody("" + at))).toList();
                    sent.forEach(each -> each.join());
                    int received = 0;
                    while (received < 25) {
                        var got = batches.receiveMessage(each -> each.queueUrl(url)).join().messages();
                        received += got.size();
                        got.stream().map(each -> batches.deleteMessage(
                            one -> one.queueUrl(url).receiptHandle(each.receiptHandle())))
                            .toList().forEach(each -> each.join());
                    }
                }
                same(receive(sqs, url, 0).size(), 0);
            });
        }
        System.exit(0);
    }
}
