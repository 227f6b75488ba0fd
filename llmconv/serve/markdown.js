/* Renders the Markdown of models as DOM elements. All text is set as textContent, so HTML in it is never parsed. */
const SCHEMES = /^(https?:\/\/|mailto:)[^\s]+$/i;
const DEEPEST = 8;
const LONGEST = 2000;
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])\s*(\1\s*){2,}$/;
const QUOTE = /^ {0,3}>\s?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const DIVIDER = /^\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?$/;

function element(tag, className, content) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (content) made.textContent = content;
  return made;
}

/* Renders `text` in `place`; unchanged blocks are kept, so that a selection survives. */
function showMarkdown(place, text) {
  const now = blocks(text.split("\n"));
  const before = place.blocks || [];
  let same = 0;
  while (same < now.length && same < before.length && now[same].source === before[same]) same++;
  while (place.children.length > same) place.lastChild.remove();
  for (const block of now.slice(same)) place.append(block.make());
  place.blocks = now.map(block => block.source);
}

/* The blocks of some lines: the source of each, and a function that renders it. */
function blocks(lines, depth = 0) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at++;
      continue;
    }
    const [end, make] = block(lines, at, depth);
    found.push({source: lines.slice(at, end).join("\n") + "\n" + end, make});
    at = end;
  }
  return found;
}

/* A match; a very long line is plain text, without a pattern search. */
function match(line, pattern) {
  return line.length < LONGEST ? line.match(pattern) : null;
}

function block(lines, at, depth) {
  const line = lines[at];
  const fence = match(line, FENCE);
  if (fence) return fenced(lines, at, fence);
  const heading = match(line, HEADING);
  if (heading) return [at + 1, () => filled("h" + Math.min(6, heading[1].length + 2), heading[2])];
  if (match(line, RULE)) return [at + 1, () => element("hr")];
  if (depth < DEEPEST && match(line, QUOTE)) return quoted(lines, at, depth);
  if (depth < DEEPEST && match(line, ITEM)) return listed(lines, at, depth);
  if (isTable(lines, at)) return table(lines, at);
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !starts(lines, end, depth)) end++;
  return [end, () => filled("p", lines.slice(at, end).join("\n"))];
}

/* Whether a line ends the paragraph before it. */
function starts(lines, at, depth) {
  const line = lines[at];
  if ([FENCE, HEADING, RULE].some(pattern => match(line, pattern)) || isTable(lines, at)) return true;
  return depth < DEEPEST && [QUOTE, ITEM].some(pattern => match(line, pattern));
}

/* Code up to a fence as long as the first one; up to the end if there is none yet. */
function fenced(lines, at, [, marks, language]) {
  const closing = new RegExp("^ {0,3}" + marks[0] + "{" + marks.length + ",}\\s*$");
  let end = at + 1;
  while (end < lines.length && !match(lines[end], closing)) end++;
  const code = lines.slice(at + 1, end).join("\n");
  return [Math.min(end + 1, lines.length), () => codeBlock(code, language.trim().split(/\s/)[0])];
}

function codeBlock(code, language) {
  const made = element("div", "code");
  const head = element("div", "head");
  head.append(element("span", "", language || "code"));
  if (navigator.clipboard) {
    const copy = element("button", "copy", "Copy");
    copy.type = "button";
    copy.addEventListener("click", () => navigator.clipboard.writeText(code).then(() => { copy.textContent = "Copied"; }, () => {}));
    head.append(copy);
  }
  const body = element("pre");
  body.tabIndex = 0;
  body.setAttribute("aria-label", (language ? language + " " : "") + "code");
  body.append(element("code", "", code));
  made.append(head, body);
  return made;
}

function quoted(lines, at, depth) {
  let end = at;
  while (end < lines.length && match(lines[end], QUOTE)) end++;
  const inner = lines.slice(at, end).map(line => line.replace(QUOTE, ""));
  return [end, () => around(element("blockquote"), inner, depth)];
}

function around(parent, lines, depth) {
  parent.append(...blocks(lines, depth + 1).map(block => block.make()));
  return parent;
}

/* Items at one indentation; lines with more indentation belong to the item before them. */
function listed(lines, at, depth) {
  const [, indent, mark] = lines[at].match(ITEM);
  const ordered = /\d/.test(mark);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const item = match(lines[end], ITEM);
    const deeper = lines[end].search(/\S/) > indent.length;
    if (item && !deeper && /\d/.test(item[2]) === ordered && !match(lines[end], RULE)) items.push([item[3]]);
    else if (!lines[end].trim() && nextIsOfList(lines, end, indent.length, ordered)) items.at(-1).push("");
    else if (lines[end].trim() && deeper) items.at(-1).push(lines[end].slice(indent.length + 2));
    else break;
    end++;
  }
  return [end, () => list(items, ordered ? parseInt(mark, 10) : 0, depth)];
}

/* Whether the list continues after empty lines. */
function nextIsOfList(lines, at, indent, ordered) {
  while (at < lines.length && !lines[at].trim()) at++;
  if (at === lines.length) return false;
  const item = match(lines[at], ITEM);
  return lines[at].search(/\S/) > indent || Boolean(item && /\d/.test(item[2]) === ordered);
}

function list(items, first, depth) {
  const made = element(first ? "ol" : "ul");
  if (first > 1) made.start = first;
  for (const [head, ...rest] of items) {
    const item = element("li");
    inline(item, head.replace(/^\[([ xX])\] /, (_, mark) => (mark === " " ? "\u2610 " : "\u2611 ")));
    made.append(around(item, rest, depth));
  }
  return made;
}

function isTable(lines, at) {
  return lines[at].includes("|") && at + 1 < lines.length && match(lines[at + 1].trim(), DIVIDER)
    && lines[at].length < LONGEST && cells(lines[at]).length === cells(lines[at + 1]).length;
}

function cells(line) {
  const inside = line.trim().replace(/^\|/, "").replace(/(^|[^\\])\|$/, "$1");
  return inside.split(/(?<!\\)\|/).map(cell => cell.trim().replaceAll("\\|", "|"));
}

function table(lines, at) {
  let end = at + 2;
  while (end < lines.length && lines[end].trim() && lines[end].includes("|")) end++;
  return [end, () => {
    const made = element("table");
    const head = cells(lines[at]);
    const sides = cells(lines[at + 1]).map(mark => (mark.endsWith(":") ? (mark[0] === ":" ? "middle" : "right") : ""));
    made.append(row("th", head, sides));
    for (const line of lines.slice(at + 2, end)) {
      const found = cells(line);
      made.append(row("td", head.map((_, column) => found[column] || ""), sides));
    }
    const scroller = element("div", "table");
    scroller.tabIndex = 0;
    scroller.append(made);
    return scroller;
  }];
}

function row(tag, texts, sides) {
  const made = element("tr");
  made.append(...texts.map((text, column) => {
    const cell = filled(tag, text);
    if (sides[column]) cell.className = sides[column];
    return cell;
  }));
  return made;
}

function filled(tag, text) {
  const made = element(tag);
  inline(made, text);
  return made;
}

/* Code, links, bold, italic and strikethrough; a marker without an end is plain text. */
function inline(parent, text, depth = 0) {
  const endless = new Set();
  let plain = "";
  let at = 0;
  while (at < text.length) {
    const [length, made] = span(text, at, depth, endless);
    if (made) {
      parent.append(plain, made);
      plain = "";
    } else {
      plain += text[at] === "\\" && length === 2 ? text[at + 1] : text.slice(at, at + length);
    }
    at += length;
  }
  parent.append(plain);
}

/* The inline element that begins at a position, with its length; no element for plain text. */
function span(text, at, depth, endless) {
  const mark = text[at];
  if (mark === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] || "")) return [2, null];
  if (mark === "`") return codeSpan(text, at, endless);
  if (depth < DEEPEST && (mark === "[" || (mark === "!" && text[at + 1] === "["))) return link(text, at, depth, endless);
  if (mark === "h" || mark === "<") return address(text, at);
  if (depth < DEEPEST && "*_~".includes(mark)) return emphasis(text, at, depth, endless);
  return [1, null];
}

/* The position of `needle` after `from`; a failed search is not repeated. */
function find(text, needle, from, endless) {
  if (endless.has(needle)) return -1;
  const found = text.indexOf(needle, from);
  if (found < 0) endless.add(needle);
  return found;
}

function codeSpan(text, at, endless) {
  const marks = text.slice(at).match(/^`+/)[0];
  let end = find(text, marks, at + marks.length, endless);
  while (end >= 0 && text[end + marks.length] === "`") {
    end += text.slice(end).match(/^`+/)[0].length;
    end = find(text, marks, end, endless);
  }
  if (end < 0) return [marks.length, null];
  const code = text.slice(at + marks.length, end).replace(/^ (.*[^ ].*) $/s, "$1");
  return [end + marks.length - at, element("code", "", code)];
}

/* `[text](address)`; an image also becomes a link, since the page loads nothing from other servers. */
function link(text, at, depth, endless) {
  const start = text[at] === "!" ? at + 2 : at + 1;
  const middle = find(text, "](", start, endless);
  const end = middle < 0 ? -1 : find(text, ")", middle, endless);
  if (end < 0 || end - start > LONGEST) return [start - at, null];
  const label = text.slice(start, middle);
  const target = text.slice(middle + 2, end).trim().split(/\s/)[0];
  if (label.includes("[") || !SCHEMES.test(target)) return [start - at, null];
  const made = anchor(target);
  inline(made, label || target, depth + 1);
  return [end + 1 - at, made];
}

function address(text, at) {
  const before = text[at - 1] || " ";
  const found = text.slice(at, at + 2000).match(/^(<)?(https?:\/\/[^\s<>"'`]+)/i);
  if (!found || /\w/.test(before)) return [1, null];
  let target = found[2].replace(/[.,;:!?*_~]+$/, "");
  if (!target.includes("(")) target = target.replace(/\)+.*$/, "");
  const made = anchor(target);
  made.textContent = target;
  const closed = found[1] && text[at + 1 + target.length] === ">";
  if (found[1] && !closed) return [1, null];
  return [target.length + (closed ? 2 : 0), made];
}

function anchor(target) {
  const made = element("a");
  made.href = target;
  made.target = "_blank";
  made.rel = "noopener noreferrer nofollow";
  made.title = target;
  return made;
}

const TAGS = {"**": "strong", "__": "strong", "~~": "del", "*": "em", "_": "em"};

function emphasis(text, at, depth, endless) {
  const double = text.slice(at, at + 2);
  const mark = double in TAGS ? double : text[at];
  const size = mark.length;
  const within = mark[0] === "_" && /\w/.test(text[at - 1] || "");
  if (!(mark in TAGS) || within || !/\S/.test(text[at + size] || "")) return [size, null];
  let end = find(text, mark, at + size + 1, endless);
  if (end >= 0 && size === 1 && text[end + 1] === mark) end = find(text, mark, end + 2, endless);
  const open = end < 0 || !/\S/.test(text[end - 1]) || (mark[0] === "_" && /\w/.test(text[end + size] || ""));
  if (open) return [size, null];
  if (size === 2 && text[end + 2] === mark[0]) end++;
  const made = element(TAGS[mark]);
  inline(made, text.slice(at + size, end), depth + 1);
  return [end + size - at, made];
}
