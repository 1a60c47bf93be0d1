// A client of the AWS SDK for JavaScript that lives on: one conversation for each line of standard input, and one line
// about each.
import { createInterface } from "node:readline";
import { BedrockRuntimeClient, ConverseCommand } from "@aws-sdk/client-bedrock-runtime";
import { described, told } from "./telling.mjs";

const client = new BedrockRuntimeClient();

async function asked({ model, text }) {
  const messages = [{ role: "user", content: [{ text }] }];
  const { output, usage } = await client.send(new ConverseCommand({ modelId: model, messages }));
  return told(output.message.content.map((block) => block.text).join(""), usage.inputTokens, usage.outputTokens);
}

for await (const line of createInterface({ input: process.stdin })) {
  const outcome = await asked(JSON.parse(line)[1]).then((answer) => ({ answer }), (failure) => ({ error: described(failure) }));
  console.log(JSON.stringify(outcome));
}
