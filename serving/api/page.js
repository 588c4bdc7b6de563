const find = (id) => document.getElementById(id);
const authorization = () => (find("token").value ? { Authorization: `Bearer ${find("token").value}` } : {});
let running = null;

async function show() {
  find("base").textContent = `${location.origin}/v1`;
  const health = await (await fetch("/health")).json();
  find("name").textContent = health.model ?? "";
  const table = find("versions");
  table.querySelectorAll("tr + tr").forEach((row) => row.remove());
  for (const one of health.versions) {
    const row = table.insertRow();
    for (const text of [one.version, `${Math.round(100 * one.share)} %`, one.ready ? "yes" : "no"]) {
      row.insertCell().textContent = text;
    }
  }
}

async function complete() {
  const answer = find("answer");
  answer.textContent = "";
  answer.className = "";
  running = new AbortController();
  find("go").disabled = !(find("stop").disabled = false);
  const began = performance.now();
  try {
    const response = await fetch("/v1/completions", {
      method: "POST",
      signal: running.signal,
      headers: { "Content-Type": "application/json", ...authorization() },
      body: JSON.stringify({
        prompt: find("prompt").value,
        max_tokens: Number(find("tokens").value),
        temperature: Number(find("temperature").value),
        stream: true,
      }),
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    await read(response.body.pipeThrough(new TextDecoderStream()).getReader(), answer);
    find("time").textContent = `${((performance.now() - began) / 1000).toFixed(1)} s, version ${response.headers.get("X-Model-Version")}`;
  } catch (error) {
    answer.className = "fault";
    answer.textContent += error.name === "AbortError" ? "" : error.message;
  } finally {
    find("go").disabled = !(find("stop").disabled = true);
  }
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
      answer.textContent += chunk.choices[0]?.text ?? "";
    }
  }
}

find("go").addEventListener("click", complete);
find("stop").addEventListener("click", () => running?.abort());
show();
setInterval(show, 5000);
