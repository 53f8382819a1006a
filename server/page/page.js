"use strict";
// Chat with this server by its own API. What is said stays in this page; nothing else is loaded or told.
const $ = (name) => document.getElementById(name);
let messages = [];
let running = null; // the AbortController of the answer under way

function headers() {
  const key = $("key").value.trim();
  return { "content-type": "application/json", ...(key ? { authorization: "Bearer " + key } : {}) };
}

function say(text, bad = false) {
  $("state").textContent = text;
  $("state").className = bad ? "bad" : "";
}

async function problem(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return "HTTP " + response.status;
  }
}

async function connect() {
  try {
    const response = await fetch("v1/models", { headers: headers() });
    if (!response.ok) {
      say(await problem(response), true);
      if (response.status === 503) setTimeout(connect, 1000); // it loads
      return;
    }
    const names = (await response.json()).data.map((model) => model.id);
    $("model").replaceChildren(...names.map((name) => new Option(name)));
    say("ready");
  } catch {
    say("the server does not answer", true);
    setTimeout(connect, 2000);
  }
}

function show(role, content) {
  const item = $("message").content.firstElementChild.cloneNode(true);
  item.className = role;
  item.querySelector("h2").textContent = role === "user" ? "You" : role === "tool" ? "Tool" : "Model";
  item.querySelector(".content").textContent = content;
  $("log").append(item);
  item.scrollIntoView({ block: "end" });
  return item;
}

function request() {
  const system = $("system").value.trim();
  const body = { model: $("model").value, stream: true, stream_options: { include_usage: true } };
  body.messages = [...(system ? [{ role: "system", content: system }] : []), ...messages];
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    if (!$(name).checkValidity()) throw new Error(name.replace("_", " ") + ": " + $(name).validationMessage);
    if ($(name).value !== "") body[name] = Number($(name).value);
  }
  const tools = $("tools").value.trim();
  if (tools) {
    try {
      body.tools = JSON.parse(tools);
    } catch {
      throw new Error("tools must be a JSON list");
    }
  }
  return body;
}

// The `data:` events of a response, as JSON, until [DONE]; an error where the response ends before.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the connection ended before the answer did");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      yield JSON.parse(line.slice(6));
    }
  }
}

function take(answer, delta) {
  const thought = delta.reasoning || delta.reasoning_content;
  if (thought) {
    answer.item.querySelector(".thought").hidden = false;
    answer.item.querySelector(".thought p").append(thought);
  }
  for (const call of delta.tool_calls || []) {
    const known = (answer.calls[call.index] ??= newCall(answer.item));
    if (call.id) known.id = call.id;
    known.name += call.function?.name || "";
    known.arguments += call.function?.arguments || "";
    known.title.textContent = "Calls " + known.name;
    known.body.textContent = known.arguments;
  }
  if (delta.content) {
    answer.text += delta.content;
    answer.item.querySelector(".content").append(delta.content);
  }
}

function newCall(item) {
  const shown = document.createElement("details");
  const title = document.createElement("summary");
  const body = document.createElement("pre");
  shown.append(title, body);
  item.querySelector(".calls").append(shown);
  return { id: "", name: "", arguments: "", title, body };
}

function keep(answer, messages) {
  const calls = Object.values(answer.calls).map((call) => ({
    id: call.id, type: "function", function: { name: call.name, arguments: call.arguments },
  }));
  if (answer.text || calls.length) {
    messages.push({ role: "assistant", content: answer.text, ...(calls.length ? { tool_calls: calls } : {}) });
  }
  for (const call of calls) { // the next message is its result
    show("tool", "Write the result of " + call.function.name + " as the next message.");
  }
  waiting = calls.map((call) => call.id);
}
let waiting = []; // ids of calls whose results are to come

function busy(is) {
  $("stop").hidden = !is;
  $("send").hidden = is;
}

async function ask(text) {
  const mine = messages; // another conversation may begin meanwhile
  const before = messages.length;
  const call = waiting.shift();
  messages.push(call ? { role: "tool", tool_call_id: call, content: text } : { role: "user", content: text });
  show(call ? "tool" : "user", text);
  if (waiting.length) return;
  const answer = { item: null, text: "", calls: {} };
  const began = performance.now();
  let first = 0;
  let usage = null;
  let end = "";
  try {
    const body = JSON.stringify(request());
    running = new AbortController();
    busy(true);
    say("answering");
    const response = await fetch("v1/chat/completions", { method: "POST", headers: headers(), body, signal: running.signal });
    if (!response.ok) throw new Error(await problem(response));
    answer.item = show("assistant", "");
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      first ||= performance.now();
      usage = event.usage || usage;
      const near = $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 80;
      for (const choice of event.choices) {
        take(answer, choice.delta);
        end = choice.finish_reason || end;
      }
      if (near) $("log").scrollTop = $("log").scrollHeight;
    }
    say(end === "length" ? "ready; the answer was cut off at its longest" : "ready");
  } catch (error) {
    const stopped = error.name === "AbortError";
    say(stopped ? "stopped" : error.message, !stopped);
    if (!answer.text && !Object.keys(answer.calls).length && mine === messages) {
      mine.length = before; // it was not answered, and may be sent again
      if (call) waiting.unshift(call);
      $("log").lastElementChild.classList.add("error");
      $("text").value ||= text;
    }
  } finally {
    running = null;
    busy(false);
    if (answer.item && mine === messages) keep(answer, mine);
    if (usage) {
      const seconds = (performance.now() - first) / 1000;
      $("figures").textContent = `${usage.prompt_tokens} tokens in, ${usage.completion_tokens} out, first after ` +
        `${Math.round(first - began)} ms, ${Math.round(usage.completion_tokens / Math.max(seconds, 0.001))} per second`;
    }
    $("text").focus();
  }
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("text").value.trim();
  if (!text || running) return;
  $("text").value = "";
  ask(text);
});
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
$("stop").addEventListener("click", () => running?.abort());
$("reset").addEventListener("click", () => {
  running?.abort();
  messages = [];
  waiting = [];
  $("log").replaceChildren();
  $("figures").textContent = "";
  $("text").focus();
});
$("key").addEventListener("change", connect);
if (matchMedia("(max-width: 44rem)").matches) document.querySelector("aside details").open = false; // a phone
connect();
