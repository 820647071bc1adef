// The page at /: a conversation with the model, and what the engine is doing. All text that comes
// from the model or the server is shown as text, never as HTML.

const $ = (id) => document.getElementById(id);
const messages = []; // {role, content}, as the API has them
let chats = true; // whether the model has a chat template
let running = null; // the AbortController of the answer that is coming

function headers() {
  const key = $("key").value;
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

// The answer's JSON, or an Error with the server's own sentence.
async function checked(response) {
  if (response.ok) return response;
  let sentence = `The server answered with status ${response.status}.`;
  try {
    sentence = (await response.json()).error.message;
  } catch {}
  throw new Error(sentence);
}

function showError(error) {
  $("error").textContent = error ? error.message : "";
  $("error").hidden = !error;
}

function show(role, content) {
  const item = document.createElement("li");
  item.dataset.role = role;
  item.textContent = content;
  $("messages").append(item);
  item.scrollIntoView({ block: "end" });
  return item;
}

// The options that are filled in; numbers as numbers.
function options() {
  const chosen = {};
  for (const field of $("options").elements) {
    if (field.name && field.name !== "system" && field.value !== "") {
      chosen[field.name] = field.valueAsNumber;
    }
  }
  return chosen;
}

function request() {
  const body = { model: $("model").value, stream: true, ...options() };
  const system = $("options").elements.system.value;
  if (chats) {
    const before = system ? [{ role: "system", content: system }] : [];
    return ["v1/chat/completions", { ...body, messages: [...before, ...messages] }];
  }
  // A model that only goes on with text gets the text so far.
  return ["v1/completions", { ...body, prompt: system + messages.map((m) => m.content).join("") }];
}

// The data of the server-sent events of a response, one by one.
async function* events(response) {
  let rest = "";
  for await (const piece of response.body.pipeThrough(new TextDecoderStream())) {
    const lines = (rest + piece).split("\n\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.slice("data: ".length);
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

async function ask(prompt) {
  showError(null);
  messages.push({ role: "user", content: prompt });
  const question = show("you", prompt);
  const answer = show("model", "");
  answer.classList.add("streaming");
  running = new AbortController();
  $("send").hidden = true;
  $("stop").hidden = false;
  let text = "";
  try {
    const [path, body] = request();
    const sent = { method: "POST", headers: headers(), signal: running.signal };
    const response = await checked(await fetch(path, { ...sent, body: JSON.stringify(body) }));
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      for (const choice of chunk.choices) text += choice.text ?? choice.delta.content ?? "";
      answer.textContent = text;
      answer.scrollIntoView({ block: "end" });
    }
    if (!text) showError(new Error("The model's answer was empty."));
  } catch (error) {
    if (error.name !== "AbortError") showError(error);
  }
  if (text) {
    messages.push({ role: "assistant", content: text });
  } else {
    // Nothing came: the question may be asked again.
    messages.pop();
    question.remove();
    answer.remove();
    $("prompt").value ||= prompt;
  }
  answer.classList.remove("streaming");
  running = null;
  $("send").hidden = false;
  $("stop").hidden = true;
  $("prompt").focus();
}

function startAnew() {
  running?.abort();
  messages.length = 0;
  $("messages").replaceChildren();
  showError(null);
}

async function loadModels() {
  try {
    const { data } = await (await checked(await fetch("v1/models", { headers: headers() }))).json();
    $("model").replaceChildren(...data.map((model) => new Option(model.id)));
    const info = await (await checked(await fetch("tokenizer_info"))).json();
    chats = Boolean(info.chat_template);
    showError(null);
  } catch (error) {
    showError(error);
  }
}

// Prometheus' text: the sum of each metric over its labels.
function metricsOf(text) {
  const sums = {};
  for (const line of text.split("\n")) {
    const found = /^([\w:]+)(?:\{.*\})? (\S+)/.exec(line);
    if (found) sums[found[1]] = (sums[found[1]] ?? 0) + Number(found[2]);
  }
  return sums;
}

const percent = (share) => `${Math.round(100 * share)} %`;
let last = null;

async function showGauges() {
  if (document.hidden) return;
  if (!$("model").length && !$("key").matches(":focus")) loadModels(); // it may be loading still
  try {
    const now = metricsOf(await (await checked(await fetch("metrics"))).text());
    now.at = performance.now();
    const tokens = now["vllm:generation_tokens_total"];
    if (last) {
      const rate = (tokens - last["vllm:generation_tokens_total"]) / ((now.at - last.at) / 1000);
      $("rate").textContent = rate.toFixed(rate < 10 ? 1 : 0);
    }
    $("running").textContent = now["vllm:num_requests_running"];
    $("waiting").textContent = now["vllm:num_requests_waiting"];
    $("kv").textContent = percent(now["vllm:kv_cache_usage_perc"]);
    const asked = now["vllm:prefix_cache_queries_total"];
    $("hits").textContent = asked ? percent(now["vllm:prefix_cache_hits_total"] / asked) : "–";
    last = now;
  } catch {
    for (const id of ["rate", "running", "waiting", "kv", "hits"]) $(id).textContent = "–";
    last = null;
  }
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const prompt = $("prompt").value;
  if (running || !prompt.trim() || !$("options").reportValidity()) return;
  $("prompt").value = "";
  ask(prompt);
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
});
$("options").addEventListener("submit", (event) => event.preventDefault());
$("stop").addEventListener("click", () => running?.abort());
$("new").addEventListener("click", startAnew);
$("key").value = sessionStorage.getItem("jllm-key") ?? "";
$("key").addEventListener("change", () => {
  sessionStorage.setItem("jllm-key", $("key").value);
  loadModels();
});

loadModels();
showGauges();
setInterval(showGauges, 1000);
