// OpenAI's own client for Node against a running server: prints what it was told, as JSON.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "ax by" }];
const asked = { model: "tiny", max_tokens: 6, temperature: 0 };
const found = {};

found.chat = (await client.chat.completions.create({ ...asked, messages })).choices[0].message.content;
found.streamed = "";
for await (const chunk of await client.chat.completions.create({ ...asked, messages, stream: true })) {
  found.streamed += chunk.choices[0]?.delta?.content ?? "";
}
found.completion = (await client.completions.create({ ...asked, prompt: "ax by" })).choices[0].text;
const response = { model: "tiny", input: "ax by", max_output_tokens: 6, temperature: 0 };
found.response = (await client.responses.create(response)).output_text;
found.responded = "";
for await (const event of await client.responses.create({ ...response, stream: true })) {
  if (event.type === "response.output_text.delta") found.responded += event.delta;
}
found.vector = (await client.embeddings.create({ model: "tiny", input: "ax" })).data[0].embedding.length;
found.models = [];
for await (const model of client.models.list()) found.models.push(model.id);
try {
  await client.chat.completions.create({ ...asked, messages, model: "other" });
} catch (error) {
  found.error = [error instanceof OpenAI.NotFoundError, error.status, error.code];
}
console.log(JSON.stringify(found));
