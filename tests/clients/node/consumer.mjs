// sqs-consumer against the server that the environment names.
import assert from "node:assert/strict";
import { test } from "node:test";
import {
  CreateQueueCommand,
  GetQueueAttributesCommand,
  SendMessageBatchCommand,
  SendMessageCommand,
  SQSClient,
} from "@aws-sdk/client-sqs";
import { Consumer } from "sqs-consumer";

const sqs = new SQSClient({ endpoint: process.env.AWS_ENDPOINT_URL, maxAttempts: 1 });
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
let number = 0;

async function queue(Attributes = {}) {
  number += 1;
  const QueueName = `${process.env.QUEUE_PREFIX}-${number}`;
  const { QueueUrl } = await sqs.send(new CreateQueueCommand({ QueueName, Attributes }));
  return QueueUrl;
}

async function send(QueueUrl, bodies) {
  for (let at = 0; at < bodies.length; at += 10) {
    const Entries = bodies
      .slice(at, at + 10)
      .map((MessageBody, each) => ({ Id: `${each}`, MessageBody }));
    const { Successful } = await sqs.send(new SendMessageBatchCommand({ QueueUrl, Entries }));
    assert.equal(Successful.length, Entries.length);
  }
}

async function left(QueueUrl) {
  const { Attributes } = await sqs.send(
    new GetQueueAttributesCommand({ QueueUrl, AttributeNames: ["All"] }),
  );
  const { ApproximateNumberOfMessages, ApproximateNumberOfMessagesNotVisible } = Attributes;
  return Number(ApproximateNumberOfMessages) + Number(ApproximateNumberOfMessagesNotVisible);
}

// Run a consumer until a condition holds; return the errors that it told of, by event.
async function consume(options, until) {
  const consumer = Consumer.create({ sqs, waitTimeSeconds: 1, ...options });
  const told = { error: [], processing_error: [] };
  consumer.on("error", (error) => told.error.push(error));
  consumer.on("processing_error", (error) => told.processing_error.push(error));
  consumer.start();
  const end = performance.now() + 120_000;
  while (!(await until(told))) {
    assert.ok(performance.now() < end, "waited too long");
    await sleep(50);
  }
  const stopped = new Promise((resolve) => consumer.once("stopped", resolve));
  consumer.stop({ abort: true });
  await stopped;
  return told;
}

test("every message is processed, one by one", async () => {
  const queueUrl = await queue({ VisibilityTimeout: "600" });
  const bodies = Array.from({ length: 60 }, (_, each) => `one ${each}`);
  await send(queueUrl, bodies);
  const seen = [];
  const handleMessage = async (message) => {
    seen.push(message.Body);
    return message;
  };
  const told = await consume(
    { queueUrl, batchSize: 10, handleMessage },
    async () => (await left(queueUrl)) === 0,
  );
  assert.deepEqual(seen.sort(), bodies.sort());
  assert.deepEqual(told, { error: [], processing_error: [] });
});

test("every message is processed, in batches", async () => {
  const queueUrl = await queue({ VisibilityTimeout: "600" });
  const bodies = Array.from({ length: 45 }, (_, each) => `batch ${each}`);
  await send(queueUrl, bodies);
  const seen = [];
  const handleMessageBatch = async (messages) => {
    seen.push(...messages.map((each) => each.Body));
    return messages;
  };
  await consume(
    { queueUrl, batchSize: 10, handleMessageBatch },
    async () => (await left(queueUrl)) === 0,
  );
  assert.deepEqual(seen.sort(), bodies.sort());
});

test("heartbeats keep a message that takes longer than its visibility timeout", async () => {
  // Several heartbeats may be late, as they are on a machine that is busy.
  const queueUrl = await queue({ VisibilityTimeout: "6" });
  await sqs.send(new SendMessageCommand({ QueueUrl: queueUrl, MessageBody: "long" }));
  let runs = 0;
  const handleMessage = async (message) => {
    runs += 1;
    await sleep(8_000);
    return message;
  };
  // A second consumer would get the message as soon as its time was up.
  let stolen = 0;
  const thief = Consumer.create({
    queueUrl,
    sqs,
    waitTimeSeconds: 1,
    handleMessage: async () => {
      stolen += 1;
    },
  });
  thief.on("error", () => {});
  thief.on("processing_error", () => {});
  await consume(
    { queueUrl, visibilityTimeout: 6, heartbeatInterval: 1, handleMessage },
    async () => {
      if (runs === 1) thief.start();
      return (await left(queueUrl)) === 0;
    },
  );
  thief.stop({ abort: true });
  assert.equal(runs, 1);
  assert.equal(stolen, 0);
});

test("a handler that takes longer than the visibility timeout gets rid of its message", async () => {
  const queueUrl = await queue({ VisibilityTimeout: "1" });
  await send(queueUrl, ["slow"]);
  let runs = 0;
  const handleMessage = async (message) => {
    runs += 1;
    await sleep(1_500);
    return message;
  };
  const told = await consume(
    { queueUrl, handleMessage },
    async () => (await left(queueUrl)) === 0,
  );
  assert.equal(runs, 1);
  assert.deepEqual(told, { error: [], processing_error: [] });
});

test("what fails is told and comes again", async () => {
  const queueUrl = await queue({ VisibilityTimeout: "600" });
  await send(queueUrl, ["good", "bad"]);
  const runs = { good: 0, bad: 0 };
  const handleMessage = async (message) => {
    runs[message.Body] += 1;
    if (message.Body === "bad" && runs.bad < 3) throw new Error("not yet");
    return message;
  };
  const told = await consume(
    { queueUrl, terminateVisibilityTimeout: true, handleMessage },
    async () => (await left(queueUrl)) === 0,
  );
  assert.deepEqual(runs, { good: 1, bad: 3 });
  assert.equal(told.processing_error.length, 2);
  assert.match(told.processing_error[0].message, /not yet/);
});

test("a queue that is not there is an error of the consumer", async () => {
  const there = await queue();
  const queueUrl = `${there}-not`;
  const told = await consume(
    { queueUrl, handleMessage: async (message) => message, authenticationErrorTimeout: 100 },
    async (so_far) => so_far.error.length > 0,
  );
  assert.equal(told.error[0].code ?? told.error[0].name, "QueueDoesNotExist");
});
