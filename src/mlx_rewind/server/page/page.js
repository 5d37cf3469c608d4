"use strict";
// A chat over /v1/chat/completions. Everything that comes is text: nothing is put in as HTML.

const at = (id) => document.getElementById(id);
let messages = JSON.parse(sessionStorage.getItem("messages") || "[]");
let running = null;

function headers() {
  const key = at("key").value;
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

function box(role) {
  const element = document.createElement("div");
  element.className = `message ${role}`;
  at("talk").append(element);
  return element;
}

function put(element, text, kind) {
  const span = document.createElement("span");
  span.textContent = text;
  if (kind) span.className = kind;
  element.append(span);
  element.scrollIntoView({ block: "end" });
}

function keep() {
  sessionStorage.setItem("messages", JSON.stringify(messages));
}

function show(usage, first, last) {
  const rate = usage.completion_tokens > 1 ? (usage.completion_tokens - 1) / ((last - first) / 1000) : 0;
  const steps = usage.completion_tokens - usage.draft_n_accepted;
  const gain = usage.completion_tokens / Math.max(1, steps);
  const drafted = usage.draft_n_per_position;
  const shares = usage.draft_n_accepted_per_position.map((n, i) => (n / drafted[i]).toFixed(2)).join(" ");
  at("stats").textContent =
    `${usage.prompt_tokens} prompt tokens, ${usage.prompt_tokens_details.cached_tokens} from the store | ` +
    `${usage.completion_tokens} tokens at ${rate.toFixed(1)}/s, ${gain.toFixed(2)} per step of the model ` +
    `(plain decoding: one)\n` +
    `${usage.draft_kind}: ${usage.draft_n_accepted} of ${usage.draft_n} drafts accepted` +
    `${shares && ", by position " + shares} | ${usage.draft_reason || "-"} | ${usage.exactness}`;
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const lines = held.split("\n\n");
    held = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      yield JSON.parse(line.slice(6));
    }
  }
}

async function answer() {
  const element = box("assistant");
  let text = "";
  let first = 0;
  running = new AbortController();
  at("stop").disabled = false;
  at("send").disabled = true;
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: headers(),
      body: JSON.stringify({ messages, stream: true }),
      signal: running.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response.body)) {
      if (event.error) throw new Error(event.error.message);
      for (const choice of event.choices) {
        const { content, reasoning } = choice.delta;
        if ((content || reasoning) && !first) first = performance.now();
        if (content) {
          text += content;
          put(element, content, choice.from_draft && "draft");
        }
        if (reasoning) put(element, reasoning, "reasoning");
      }
      if (event.x_usage) show(event.x_usage, first, performance.now());
    }
  } catch (error) {
    if (error.name !== "AbortError") put(element, `\n${error.message}`, "error");
  }
  running = null;
  at("stop").disabled = true;
  at("send").disabled = false;
  messages.push({ role: "assistant", content: text });
  keep();
  at("text").focus();
}

function ask(event) {
  event.preventDefault();
  const text = at("text").value.trim();
  if (!text || running) return;
  at("text").value = "";
  messages.push({ role: "user", content: text });
  put(box("user"), text);
  keep();
  answer();
}

at("ask").addEventListener("submit", ask);
at("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) ask(event);
  if (event.key === "Escape") running?.abort();
});
at("stop").addEventListener("click", () => running?.abort());
at("clear").addEventListener("click", () => {
  running?.abort();
  messages = [];
  keep();
  at("talk").replaceChildren();
  at("stats").textContent = "";
});
at("shade").addEventListener("change", () => at("talk").classList.toggle("shaded", at("shade").checked));
at("talk").classList.add("shaded");
for (const message of messages) put(box(message.role), message.content);
fetch("v1/models", { headers: headers() })
  .then((response) => response.json())
  .then((list) => {
    const model = list.data[0];
    at("model").textContent = `${model.id}, drafter ${model.speculation.draft_kind}`;
  })
  .catch(() => {});
