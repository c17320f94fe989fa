// A little Markdown: headings, lists, bold, italic, code. Elements are made one by one and get their words as
// text, so no word of an answer can become an element or an attribute. Everything else stays as it is written.

const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6}) +(\S.*)$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)]) +(\S.*)$/;
const DEEPEST = 8;  // levels of lists

/** The elements of a text. */
export function markdown(text) {
  const whole = document.createDocumentFragment();
  let lists = [];  // the open ones: {element, indent}
  let paragraph = null;  // where the next line goes on
  const lines = text.split("\n");
  for (let i = 0; i < lines.length; i += 1) {
    const line = lines[i];
    const [, fence] = FENCE.exec(line) ?? [], [, level, title] = HEADING.exec(line) ?? [];
    const [, indent, bullet, entry] = ITEM.exec(line) ?? [];
    if (fence) {
      const rest = lines.slice(i + 1), last = rest.findIndex((other) => closes(other, fence));
      const code = last < 0 ? rest : rest.slice(0, last);
      made(made(lists.at(-1)?.element.lastChild ?? whole, "pre"), "code").textContent = code.join("\n");
      i += code.length + (last < 0 ? 0 : 1);
      paragraph = null;
    } else if (level) {
      lists = [];
      spans(made(whole, `h${Math.min(6, level.length + 2)}`), title);
      paragraph = null;
    } else if (bullet) {
      while (lists.length && indent.length < lists.at(-1).indent) lists.pop();
      const kind = /\d/.test(bullet) ? "ol" : "ul";
      let list = lists.at(-1);
      if (!list || (indent.length > list.indent + 1 && lists.length < DEEPEST)) {
        list = { element: made(list?.element.lastChild ?? whole, kind), indent: indent.length };
        lists.push(list);
      } else if (list.element.localName !== kind) {  // another list, in its place
        list.element = made(list.element.parentNode, kind);
      }
      if (kind === "ol" && !list.element.firstChild) list.element.start = parseInt(bullet, 10);
      paragraph = made(list.element, "li");
      spans(paragraph, entry);
    } else if (!line.trim()) {
      paragraph = null;
    } else {
      if (!paragraph && !line.startsWith("  ")) lists = [];
      const next = paragraph ?? made(lists.at(-1)?.element.lastChild ?? whole, "p");
      if (paragraph) next.append("\n");
      spans(next, line);
      paragraph = next;
    }
  }
  return whole;
}

const closes = (line, fence) => line.trim().length >= fence.length && line.trim() === fence[0].repeat(line.trim().length);

/** Add a line to an element, with code, bold and italic words. */
function spans(parent, text) {
  const unclosed = new Set();  // marks that nothing later closes: looked for once
  let plain = 0;  // the first character that is not added yet
  for (let i = 0; i < text.length;) {
    const [mark] = /^(?:`+|\*+|_+)?/.exec(text.slice(i, i + 64));
    const end = mark && !unclosed.has(mark) ? closing(text, i, mark) : -1;
    if (end < 0) {
      if (mark && end === -1) unclosed.add(mark);
      i += mark.length || 1;
      continue;
    }
    parent.append(text.slice(plain, i));
    const inner = text.slice(i + mark.length, end);
    if (mark[0] === "`") made(parent, "code").textContent = inner;
    else {
      const strong = mark.length > 1 ? made(parent, "strong") : parent;
      spans(mark.length === 2 ? strong : made(strong, "em"), inner);
    }
    i = plain = end + mark.length;
  }
  parent.append(text.slice(plain));
}

/** Where the mark at ``start`` is closed; -1 if nothing later can close one, -2 if it opens nothing. */
function closing(text, start, mark) {
  const from = start + mark.length, code = mark[0] === "`";
  if (!code && (mark.length > 3 || !/\S/.test(text[from] ?? " "))) return -2;
  if (mark[0] === "_" && /\w/.test(text[start - 1] ?? " ")) return -2;
  for (let at = text.indexOf(mark, from); at >= 0; at = text.indexOf(mark, at + 1)) {
    if (text[at - 1] === mark[0] || text[at + mark.length] === mark[0]) continue;  // of a longer run
    if (code) return at;
    if (at > from && /\S/.test(text[at - 1]) && !(mark[0] === "_" && /\w/.test(text[at + mark.length] ?? " "))) return at;
  }
  return -1;
}

function made(parent, kind) {
  const element = document.createElement(kind);
  parent.append(element);
  return element;
}
