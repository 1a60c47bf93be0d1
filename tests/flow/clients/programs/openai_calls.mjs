// openai: chat completions as a whole, and as a stream that ends with its usage.
import OpenAI from "openai";
import { tell, told } from "./telling.mjs";

function opened(settings) {
  const client = new OpenAI(settings);
  return async (operation, { model, text }) => {
    const asked = { model, max_tokens: 40, messages: [{ role: "user", content: text }] };
    if (operation === "ask") {
      const whole = await client.chat.completions.create(asked);
      return told(whole.choices[0].message.content, whole.usage.prompt_tokens, whole.usage.completion_tokens);
    }
    const chunks = [];
    const options = { stream: true, stream_options: { include_usage: true } };
    for await (const chunk of await client.chat.completions.create({ ...asked, ...options })) chunks.push(chunk);
    const answered = chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join("");
    const { usage } = chunks.at(-1);
    return told(answered, usage.prompt_tokens, usage.completion_tokens);
  };
}

await tell("openai", opened);
