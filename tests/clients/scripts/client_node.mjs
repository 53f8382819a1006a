// The openai SDK for node: chat and Responses.
import assert from "node:assert";
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const messages = [{ role: "user", content: "Is it warm in Rome?" }];
const parameters = {
  type: "object",
  properties: { city: { type: "string", enum: ["Paris", "Rome"] }, warm: { type: "boolean" } },
  required: ["city", "warm"],
  additionalProperties: false,
};
const check = (text) => assert.ok(["Paris", "Rome"].includes(JSON.parse(text).city), text);

const tools = [{ type: "function", function: { name: "weather", parameters } }];
const called = await client.chat.completions
  .stream({ model, messages, tools, tool_choice: "required", max_tokens: 400 })
  .finalChatCompletion();
check(called.choices[0].message.tool_calls[0].function.arguments);
const schema = { name: "weather", schema: parameters, strict: true };
const formed = await client.chat.completions.create({
  model, messages, max_tokens: 400, response_format: { type: "json_schema", json_schema: schema },
});
check(formed.choices[0].message.content);

const kinds = [];
const stream = client.responses.stream({
  model, input: "Is it warm in Rome?", max_output_tokens: 400, tool_choice: "required", parallel_tool_calls: false,
  tools: [{ type: "function", name: "weather", parameters, strict: true }],
});
stream.on("event", (event) => kinds.push(event.type));
const response = await stream.finalResponse();
assert.equal(kinds.at(-1), "response.completed");
check(response.output.find((item) => item.type === "function_call").arguments);
const text = await client.responses.create({
  model, input: "Is it warm in Rome?", max_output_tokens: 400, text: { format: { type: "json_schema", ...schema } },
});
check(text.output_text);
