// @aws-sdk/client-sqs against the server that the environment names.
import assert from "node:assert/strict";
import { test } from "node:test";
import {
  ChangeMessageVisibilityBatchCommand,
  ChangeMessageVisibilityCommand,
  CreateQueueCommand,
  DeleteMessageBatchCommand,
  DeleteMessageCommand,
  GetQueueAttributesCommand,
  GetQueueUrlCommand,
  ListQueuesCommand,
  QueueDoesNotExist,
  ReceiptHandleIsInvalid,
  ReceiveMessageCommand,
  SendMessageBatchCommand,
  SendMessageCommand,
  SQSClient,
} from "@aws-sdk/client-sqs";

const sqs = new SQSClient({ endpoint: process.env.AWS_ENDPOINT_URL, maxAttempts: 1 });
let number = 0;

async function queue(Attributes = {}, suffix = "") {
  number += 1;
  const QueueName = `${process.env.QUEUE_PREFIX}-${number}${suffix}`;
  const { QueueUrl } = await sqs.send(new CreateQueueCommand({ QueueName, Attributes }));
  return QueueUrl;
}

const receive = (QueueUrl, more = {}) =>
  sqs.send(new ReceiveMessageCommand({ QueueUrl, ...more })).then((answer) => answer.Messages ?? []);

test("a message is sent, received and deleted", async () => {
  const QueueUrl = await queue({ VisibilityTimeout: "30" });
  // The SDK checks the digests of bodies itself.
  const sent = await sqs.send(
    new SendMessageCommand({
      QueueUrl,
      MessageBody: "grüße & <tags> \u{1F98A}",
      MessageAttributes: {
        text: { DataType: "String", StringValue: "a" },
        count: { DataType: "Number", StringValue: "12" },
        bytes: { DataType: "Binary", BinaryValue: new Uint8Array([0, 255, 1]) },
      },
    }),
  );
  const [message] = await receive(QueueUrl, {
    MessageAttributeNames: ["All"],
    MessageSystemAttributeNames: ["All"],
  });
  assert.equal(message.MessageId, sent.MessageId);
  assert.equal(message.Body, "grüße & <tags> \u{1F98A}");
  assert.equal(message.MD5OfMessageAttributes, sent.MD5OfMessageAttributes);
  assert.deepEqual([...message.MessageAttributes.bytes.BinaryValue], [0, 255, 1]);
  assert.equal(message.MessageAttributes.count.StringValue, "12");
  assert.equal(message.Attributes.ApproximateReceiveCount, "1");
  const ReceiptHandle = message.ReceiptHandle;
  await sqs.send(new DeleteMessageCommand({ QueueUrl, ReceiptHandle }));
  const { Attributes } = await sqs.send(
    new GetQueueAttributesCommand({ QueueUrl, AttributeNames: ["All"] }),
  );
  assert.equal(Attributes.ApproximateNumberOfMessages, "0");
  assert.equal(Attributes.ApproximateNumberOfMessagesNotVisible, "0");
});

test("batches, each entry for itself", async () => {
  const QueueUrl = await queue();
  const bodies = Array.from({ length: 10 }, (_, each) => `body ${each}`);
  const sent = await sqs.send(
    new SendMessageBatchCommand({
      QueueUrl,
      Entries: bodies.map((MessageBody, each) => ({ Id: `id-${each}`, MessageBody })),
    }),
  );
  assert.equal(sent.Successful.length, 10);
  const messages = [];
  while (messages.length < 10) {
    const more = await receive(QueueUrl, { MaxNumberOfMessages: 10, WaitTimeSeconds: 5 });
    assert.notEqual(more.length, 0);
    messages.push(...more);
  }
  assert.deepEqual(messages.map((each) => each.Body).sort(), bodies);
  const entries = messages.map((each, at) => ({ Id: `${at}`, ReceiptHandle: each.ReceiptHandle }));
  const changed = await sqs.send(
    new ChangeMessageVisibilityBatchCommand({
      QueueUrl,
      Entries: entries.slice(0, 2).map((each) => ({ ...each, VisibilityTimeout: 0 })),
    }),
  );
  assert.equal(changed.Successful.length, 2);
  const deleted = await sqs.send(
    new DeleteMessageBatchCommand({
      QueueUrl,
      Entries: [...entries.slice(2), { Id: "bad", ReceiptHandle: "nonsense" }],
    }),
  );
  assert.equal(deleted.Successful.length, 8);
  assert.deepEqual(deleted.Failed.map((each) => each.Id), ["bad"]);
  const again = await receive(QueueUrl, { MaxNumberOfMessages: 10 });
  assert.deepEqual(
    again.map((each) => each.Body).sort(),
    messages.slice(0, 2).map((each) => each.Body).sort(),
  );
});

test("a long poll ends when a message comes", async () => {
  const QueueUrl = await queue();
  const began = performance.now();
  const waiting = receive(QueueUrl, { WaitTimeSeconds: 20 });
  await new Promise((resolve) => setTimeout(resolve, 300));
  await sqs.send(new SendMessageCommand({ QueueUrl, MessageBody: "at last" }));
  const [message] = await waiting;
  const took = performance.now() - began;
  assert.equal(message.Body, "at last");
  assert.ok(took >= 290 && took < 19_500, `${took} ms`);
});

test("a long poll that nothing comes for ends empty", async () => {
  const QueueUrl = await queue();
  const began = performance.now();
  assert.deepEqual(await receive(QueueUrl, { WaitTimeSeconds: 1 }), []);
  assert.ok(performance.now() - began >= 900);
});

test("visibility is changed to be received again at once", async () => {
  const QueueUrl = await queue();
  await sqs.send(new SendMessageCommand({ QueueUrl, MessageBody: "x" }));
  const [first] = await receive(QueueUrl);
  assert.deepEqual(await receive(QueueUrl), []);
  await sqs.send(
    new ChangeMessageVisibilityCommand({
      QueueUrl,
      ReceiptHandle: first.ReceiptHandle,
      VisibilityTimeout: 0,
    }),
  );
  const [second] = await receive(QueueUrl, { MessageSystemAttributeNames: ["All"] });
  assert.equal(second.MessageId, first.MessageId);
  assert.equal(second.Attributes.ApproximateReceiveCount, "2");
});

test("a FIFO queue keeps the order and drops what comes twice", async () => {
  const QueueUrl = await queue({ FifoQueue: "true", ContentBasedDeduplication: "true" }, ".fifo");
  for (const MessageBody of ["a", "b", "b", "c"]) {
    await sqs.send(new SendMessageCommand({ QueueUrl, MessageBody, MessageGroupId: "g" }));
  }
  const messages = await receive(QueueUrl, { MaxNumberOfMessages: 10 });
  assert.deepEqual(messages.map((each) => each.Body), ["a", "b", "c"]);
});

test("errors are the SDK's own classes", async () => {
  const QueueUrl = await queue();
  const { QueueUrls } = await sqs.send(
    new ListQueuesCommand({ QueueNamePrefix: process.env.QUEUE_PREFIX }),
  );
  assert.ok(QueueUrls.includes(QueueUrl));
  await assert.rejects(
    sqs.send(new GetQueueUrlCommand({ QueueName: "there-is-no-such-queue" })),
    (error) => error instanceof QueueDoesNotExist && error.$fault === "client",
  );
  await assert.rejects(
    sqs.send(new DeleteMessageCommand({ QueueUrl, ReceiptHandle: "nonsense" })),
    (error) => error instanceof ReceiptHandleIsInvalid,
  );
});

test("a wrong secret opens nothing", { skip: !process.env.SIGNED }, async () => {
  const stranger = new SQSClient({
    endpoint: process.env.AWS_ENDPOINT_URL,
    maxAttempts: 1,
    credentials: { accessKeyId: process.env.AWS_ACCESS_KEY_ID, secretAccessKey: "wrong" },
  });
  await assert.rejects(
    stranger.send(new ListQueuesCommand({})),
    (error) => error.$metadata.httpStatusCode === 403,
  );
});
