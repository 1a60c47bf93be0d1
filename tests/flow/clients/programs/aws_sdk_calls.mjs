// The AWS SDK for JavaScript: every operation by its own name; `ask` and `ask_stream` stand for a conversation.
import * as sdk from "@aws-sdk/client-bedrock-runtime";
import { NodeHttp2Handler, NodeHttpHandler } from "@smithy/node-http-handler";
import { tell, told } from "./telling.mjs";

// Unless settings say otherwise, the client is as it comes: HTTP/2.
function opened({ http1, requestTimeout, ...config }) {
  const options = requestTimeout ? { requestTimeout, throwOnRequestTimeout: true } : undefined;
  const Handler = http1 ? NodeHttpHandler : NodeHttp2Handler;
  if (http1 || options) config.requestHandler = new Handler(options);
  const client = new sdk.BedrockRuntimeClient(config);
  return (operation, args) => carriedOut(client, operation, args);
}

async function carriedOut(client, operation, args) {
  if (operation === "ask") {
    const whole = await client.send(new sdk.ConverseCommand(turn(args)));
    const text = whole.output.message.content.map((block) => block.text).join("");
    return told(text, whole.usage.inputTokens, whole.usage.outputTokens);
  }
  if (operation === "ask_stream") {
    const { stream } = await client.send(new sdk.ConverseStreamCommand(turn(args)));
    const events = await all(stream);
    const usage = events.at(-1).metadata.usage;
    return told(events.map(textOf).join(""), usage.inputTokens, usage.outputTokens);
  }
  return read(client, operation, await client.send(new sdk[`${operation}Command`](args)));
}

function turn({ model, text }) {
  return { modelId: model, messages: [{ role: "user", content: [{ text }] }] };
}

const textOf = (event) => event.contentBlockDelta?.delta.text ?? "";

async function read(client, operation, answer) {
  const protocol = client.config.requestHandler.constructor.name;
  if (operation === "ConverseStream") return { ...answer, protocol, stream: await all(answer.stream) };
  if (operation === "InvokeModel") return { ...answer, protocol, body: Buffer.from(answer.body).toString() };
  if (operation !== "InvokeModelWithResponseStream") return { ...answer, protocol };
  const chunks = (await all(answer.body)).map((event) => ({ chunk: { bytes: Buffer.from(event.chunk.bytes).toString() } }));
  return { ...answer, protocol, body: chunks };
}

async function all(stream) {
  const events = [];
  for await (const event of stream) events.push(event);
  return events;
}

await tell("@aws-sdk/client-bedrock-runtime", opened);
