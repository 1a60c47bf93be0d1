// @anthropic-ai/bedrock-sdk: messages as a whole and as a stream.
import AnthropicBedrock from "@anthropic-ai/bedrock-sdk";
import { tell, told } from "./telling.mjs";

function opened(settings) {
  const client = new AnthropicBedrock(settings);
  return async (operation, { model, text }) => {
    const asked = { model, max_tokens: 40, messages: [{ role: "user", content: text }] };
    const message =
      operation === "ask"
        ? await client.messages.create(asked)
        : await client.messages.stream(asked).finalMessage();
    const answered = message.content.map((block) => block.text).join("");
    return told(answered, message.usage.input_tokens, message.usage.output_tokens);
  };
}

await tell("@anthropic-ai/bedrock-sdk", opened);
