"use strict";
const find = (id) => document.getElementById(id);
let running = null;

// What comes from the server is set and escaped there; scripts in it would not run by the policy.
async function trace(fields, place) {
  place.textContent = "Searching the training text …";
  const response = await fetch("/ask/trace", { method: "POST", body: new URLSearchParams(fields) });
  if (response.redirected) return location.assign(response.url);
  const found = new DOMParser().parseFromString(await response.text(), "text/html");
  place.replaceChildren(...found.body.childNodes);
}

async function ask(card, prompt) {
  const [answer, place, time] = [".answer", ".traced", ".time"].map((name) => card.querySelector(name));
  const kind = find("kind").value;
  const began = performance.now();
  answer.className = "answer";
  answer.textContent = "";
  answer.hidden = false;
  place?.replaceChildren();
  time.textContent = card.querySelector("input") ? "Starting its engine, if it is not running …" : "";
  try {
    const path = { chat: "v1/chat/completions", completion: "v1/completions", predict: "predict" }[kind];
    const response = await fetch(`${card.dataset.address}/${path}`, {
      method: "POST",
      signal: running.signal,
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(kind === "predict" ? { instances: [prompt] } : {
        model: card.dataset.version,
        ...(kind === "chat" ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
        max_tokens: Number(find("tokens").value),
        temperature: Number(find("temperature").value),
        stop: find("line").checked ? ["\n"] : [],
        stream: true,
      }),
    });
    // A board that was started again knows nobody: to its form for signing in.
    if (response.redirected) return location.assign(response.url);
    if (!response.ok) throw new Error((await response.json()).error.message);
    const version = response.headers.get("X-Model-Version");
    const found = kind === "predict" ? (await response.json()).predictions[0] : null;
    if (found !== null) answer.textContent = found.scores ? likeliest(found.scores) : found;
    else await read(response.body.pipeThrough(new TextDecoderStream()).getReader(), answer);
    const seconds = ((performance.now() - began) / 1000).toFixed(1);
    time.textContent = `${seconds} s, version ${version}, request id ${response.headers.get("X-Request-Id")}`;
    // A class is no text that the training text could hold.
    if (place && answer.textContent.trim() && !found?.scores) await trace({ text: answer.textContent, question: prompt, version }, place);
    // The same text, with its sources.
    answer.hidden = Boolean(place?.querySelector(".spans"));
  } catch (error) {
    time.textContent = "";
    if (error.name === "AbortError") return;
    answer.className = "answer fault";
    answer.textContent += error.message;
  }
}

function likeliest(scores) {
  const ranked = Object.entries(scores).sort((one, other) => other[1] - one[1]).slice(0, 5);
  return ranked.map(([label, score]) => `${label} ${(100 * score).toFixed(1)}%`).join(", ");
}

async function read(reader, answer) {
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      const choice = chunk.choices[0];
      const piece = choice?.text ?? choice?.delta?.content ?? "";
      answer.textContent = (answer.textContent + piece).trimStart();
    }
  }
}

find("ask")?.addEventListener("submit", async (event) => {
  event.preventDefault();
  const prompt = find("prompt").value;
  running = new AbortController();
  find("go").disabled = !(find("stop").disabled = false);
  const cards = [...document.querySelectorAll("[data-address]")];
  const chosen = cards.filter((card) => card.querySelector(".answer") && card.querySelector("input")?.checked !== false);
  await Promise.all(chosen.map((card) => ask(card, prompt)));
  find("go").disabled = !(find("stop").disabled = true);
});
find("stop")?.addEventListener("click", () => running?.abort());
find("trace")?.addEventListener("submit", (event) => {
  event.preventDefault();
  trace(new FormData(event.target), find("traced"));
});
document.addEventListener("click", (event) => {
  const { target } = event;
  if (target.dataset.prompt && target.matches("button")) {
    find("prompt").value = target.dataset.prompt;
    find("prompt").scrollIntoView({ block: "center" });
    if (!find("go").disabled) find("ask").requestSubmit();
  }
  if (target.matches("button.span")) {
    const open = target.getAttribute("aria-expanded") !== "true";
    target.setAttribute("aria-expanded", String(open));
    const box = target.closest(".spans").parentElement;
    for (const one of box.querySelectorAll(`div[data-stretch="${target.dataset.stretch}"]`)) one.hidden = !open;
  }
});
