const at = id => document.getElementById(id);
const log = at("log"), text = at("text"), scroll = at("scroll");
const CONTINUED = 64; /* default number of tokens of a continuation; the API's own default is 16 */
const SAMPLING = [["temperature", "temperature"], ["top-p", "top_p"], ["top-k", "top_k"], ["seed", "seed"], ["limit", "max_tokens"]];
let messages = [];
let running = null;
let defaults = {}; /* of the server, for options that are left empty */
let images = []; /* data URLs of the images of the next message */
const SIDE = 1024; /* the longer side of an image that is sent, in pixels */

/* The chat stays over a reload of its tab; a browser without room for it (images) keeps none. */
function remember() {
  try {
    sessionStorage.setItem("chat", JSON.stringify({model: at("model").textContent, messages}));
  } catch {
    sessionStorage.removeItem("chat");
  }
}

function restore() {
  let kept = null;
  try {
    kept = JSON.parse(sessionStorage.getItem("chat"));
  } catch { /* another page wrote it */ }
  if (!isChat() || messages.length || !kept || kept.model !== at("model").textContent || !Array.isArray(kept.messages)) return;
  for (const {role, content, note} of kept.messages) {
    const parts = Array.isArray(content) ? content : [{text: content}];
    const words = parts.map(part => part.text || "").join("");
    if (role === "user") {
      showUser(words, parts.filter(part => part.image_url).map(part => part.image_url.url));
    } else {
      const made = article("assistant", "Model");
      made.shown = words;
      paint(made);
      if (note) made.append(element("div", note.failed ? "error" : "note", note.text));
    }
  }
  messages = kept.messages;
  toEnd();
}

function headers() {
  const key = at("key").value.trim();
  return key ? {"Authorization": "Bearer " + key} : {};
}

async function failure(response) {
  if (response.status === 401) {
    at("keyed").hidden = false;
    at("details").open = true;
  }
  try {
    return (await response.json()).error.message;
  } catch {
    return "the server answered " + response.status;
  }
}

function isChat() {
  return at("mode").value === "chat";
}

function article(role, title) {
  at("empty").hidden = true;
  const made = element("article", role);
  made.append(element("h2", "", title), element("div", "text"));
  made.shown = "";
  log.append(made);
  return made;
}

function showUser(content, pictures) {
  const made = article("user", "You");
  made.shown = made.lastChild.textContent = content;
  for (const url of pictures) made.append(picture(url));
  return made;
}

function picture(url) {
  const made = element("img", "");
  made.src = url;
  made.alt = "image";
  return made;
}

/* A smaller copy of an image: no processor of a model uses more pixels, and requests have a limit. */
async function shrunk(file) {
  const image = await createImageBitmap(file);
  const scale = Math.min(1, SIDE / Math.max(image.width, image.height));
  const canvas = element("canvas", "");
  canvas.width = Math.max(1, Math.round(image.width * scale));
  canvas.height = Math.max(1, Math.round(image.height * scale));
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.92);
}

async function attach() {
  for (const file of at("file").files) {
    try {
      images.push(await shrunk(file));
    } catch {
      log.append(element("div", "error", file.name + " is not an image that this browser shows"));
    }
  }
  at("file").value = "";
  showImages();
}

/* The images of the next message; a click removes one. */
function showImages() {
  at("images").replaceChildren(...images.map(url => {
    const made = element("button", "");
    made.type = "button";
    made.title = "Remove this image";
    made.append(picture(url));
    made.addEventListener("click", () => { images = images.filter(one => one !== url); showImages(); });
    return made;
  }));
}

/* The content of a message in OpenAI's form. */
function withImages(content, pictures) {
  if (!pictures.length) return content;
  return [...pictures.map(url => ({type: "image_url", image_url: {url}})), {type: "text", text: content}];
}

/* An answer, as Markdown or as plain text. A continued text keeps its spaces and lines. */
function paint(made) {
  const place = made.querySelector(".text");
  const asMarkdown = made.given === undefined && at("markdown").checked;
  if (place.classList.contains("markdown") !== asMarkdown) place.replaceChildren();
  place.className = asMarkdown ? "text markdown" : "text raw";
  if (asMarkdown) {
    showMarkdown(place, made.shown);
    return;
  }
  place.blocks = null;
  place.replaceChildren(made.shown);
  if (made.given) place.prepend(element("span", "given", made.given));
}

/* Repaints at most once per frame. */
function paintSoon(made) {
  made.frame ||= requestAnimationFrame(() => {
    const follow = atEnd();
    made.frame = 0;
    paint(made);
    if (follow) toEnd();
  });
}

function atEnd() {
  return scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 60;
}

function toEnd() {
  scroll.scrollTop = scroll.scrollHeight;
}

/* The data of every server-sent event, as it arrives. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    const {value, done} = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
  }
}

function sampling() {
  const body = {stream: true, stream_options: {include_usage: true}};
  for (const [id, name] of SAMPLING) if (at(id).value !== "") body[name] = Number(at(id).value);
  return body;
}

function chatRequest() {
  const system = at("system").value.trim();
  const sent = messages.map(({role, content}) => ({role, content}));
  return {messages: system ? [{role: "system", content: system}, ...sent] : sent, ...sampling()};
}

async function answer(made, path, body, signal) {
  const result = {finish: "", usage: null, seconds: 0, reasoning: 0};
  let first = 0;
  const response = await fetch(path, {
    method: "POST", headers: {"Content-Type": "application/json", ...headers()}, body: JSON.stringify(body), signal,
  });
  if (!response.ok) throw new Error(await failure(response));
  for await (const data of events(response.body)) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.usage) result.usage = chunk.usage;
    if (!chunk.choices.length) continue;
    first ||= performance.now();
    const choice = chunk.choices[0];
    result.finish = choice.finish_reason || result.finish;
    result.reasoning += ((choice.delta && choice.delta.reasoning_content) || "").length;
    made.shown += (choice.delta ? choice.delta.content : choice.text) || "";
    paintSoon(made);
  }
  result.seconds = (performance.now() - first) / 1000;
  return result;
}

function describe(result) {
  const parts = [];
  if (result.usage) {
    const count = result.usage.completion_tokens;
    parts.push(count + (count === 1 ? " token" : " tokens"));
    if (count > 1 && result.seconds > 0) parts.push(((count - 1) / result.seconds).toFixed(1) + " tokens/s");
  }
  if (result.reasoning) parts.push("after " + result.reasoning + " characters of reasoning");
  if (result.finish === "length") parts.push("cut off at the limit");
  return parts.join(" · ");
}

function busy(controller) {
  running = controller;
  at("send").hidden = controller !== null;
  at("stop").hidden = controller === null;
  log.setAttribute("aria-busy", String(controller !== null));
  log.querySelectorAll(".go").forEach(button => { button.disabled = controller !== null; });
  ready();
}

async function ask(content) {
  const pictures = images;
  images = [];
  showImages();
  const mine = showUser(content, pictures);
  const made = article("assistant", "Model");
  messages.push({role: "user", content: withImages(content, pictures)});
  const chat = messages;
  const undo = () => { chat.pop(); mine.remove(); images = pictures; showImages(); };
  const keep = note => {
    const kept = {text: note.textContent, failed: note.className === "error"};
    chat.push({role: "assistant", content: made.shown, note: kept});
    remember();
  };
  await run(made, "v1/chat/completions", chatRequest(), content, undo, keep, () => chat === messages);
}

async function goOn(content) {
  const made = article("assistant", "Text");
  made.given = content;
  paint(made);
  const body = {prompt: content, max_tokens: CONTINUED, ...sampling()};
  await run(made, "v1/completions", body, content, () => {}, () => offerMore(made), () => made.isConnected);
}

/* A button that continues the text. */
function offerMore(made) {
  const more = element("button", "go", "Continue");
  more.type = "button";
  more.disabled = true;
  more.addEventListener("click", () => {
    if (!running) goOn(made.given + made.shown);
  });
  made.lastChild.append(more);
}

/* One request: `undo` reverts a request that never began, `keep` stores the answer with its note, `current` is whether it is shown. */
async function run(made, path, body, content, undo, keep, current) {
  const controller = new AbortController();
  made.classList.add("growing");
  busy(controller);
  toEnd();
  let note = null;
  try {
    note = element("div", "note", describe(await answer(made, path, body, controller.signal)));
  } catch (error) {
    if (current()) note = broken(error, made, content, undo);
  } finally {
    made.classList.remove("growing");
    paint(made);
    if (note && current()) {
      made.append(note);
      keep(note);
    }
    if (running === controller) busy(null);
    toEnd();
    text.focus();
  }
}

/* A stopped or failed answer keeps its text so far; a message that was never sent goes back to the input field. */
function broken(error, made, content, undo) {
  const stopped = error.name === "AbortError";
  if (made.shown) return element("div", stopped ? "note" : "error", stopped ? "stopped" : error.message);
  undo();
  made.remove();
  if (!text.value) text.value = content;
  if (!stopped) log.append(element("div", "error", error.message || "the server cannot be reached"));
  grow();
  return null;
}

function ready() {
  at("send").disabled = running !== null || !text.value.trim();
}

function grow() {
  text.style.height = "auto";
  text.style.height = text.scrollHeight + 2 + "px";
  ready();
}

function submit() {
  const content = isChat() ? text.value.trim() : text.value;
  if (!content.trim() || running) return;
  log.querySelectorAll(":scope > .error").forEach(old => old.remove());
  text.value = "";
  grow();
  if (isChat()) ask(content);
  else goOn(content);
}

function stop() {
  if (running) running.abort();
}

function reset() {
  messages = [];
  sessionStorage.removeItem("chat");
  images = [];
  showImages();
  stop();
  log.querySelectorAll("article, .error").forEach(old => old.remove());
  at("empty").hidden = false;
  text.focus();
}

/* A chat, or a text that the model continues. */
function setMode() {
  const chat = isChat();
  const name = chat ? "Message" : "Text to continue";
  text.placeholder = name;
  text.setAttribute("aria-label", name);
  at("send").textContent = chat ? "Send" : "Continue";
  at("reset").textContent = chat ? "New chat" : "Clear";
  at("empty").textContent = chat ? "Write a message below." : "Write the beginning of a text below; the model continues it.";
  showDefaults();
  at("instructed").hidden = !chat;
  at("markdown").parentElement.hidden = !chat;
}

/* What an empty option means. Top-p alone turns on sampling, as the server does, with the model's temperature. */
function showDefaults() {
  const sampled = defaults.do_sample || at("top-p").value !== "";
  const known = {
    "temperature": sampled ? defaults.temperature : 0, "top-p": defaults.top_p, "top-k": defaults.top_k,
    "limit": isChat() ? defaults.max_tokens : CONTINUED,
  };
  for (const [id, value] of Object.entries(known)) at(id).placeholder = value ?? "";
}

function meet(state) {
  at("model").textContent = document.title = state.model;
  defaults = state.defaults;
  showDefaults();
  at("attach").hidden = !state.images;
  if (state.chat) {
    restore();
    return;
  }
  at("mode").value = "text";
  at("mode").disabled = true;
  at("mode").title = "this model has no chat template";
  setMode();
  at("empty").textContent += " It has no chat template, so it does not chat.";
}

at("form").addEventListener("submit", event => { event.preventDefault(); submit(); });
at("stop").addEventListener("click", stop);
at("attach").addEventListener("click", () => at("file").click());
at("file").addEventListener("change", attach);
at("reset").addEventListener("click", reset);
at("mode").addEventListener("change", setMode);
at("top-p").addEventListener("input", showDefaults);
at("markdown").addEventListener("change", () => log.querySelectorAll("article.assistant").forEach(paint));
text.addEventListener("input", grow);
text.addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    submit();
  }
});
document.addEventListener("keydown", event => { if (event.key === "Escape") stop(); });

fetch("health").then(response => response.json()).then(meet).catch(() => {});
