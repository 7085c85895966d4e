/** A text as Markdown in which the drafter's tokens are marked. Nothing in the text runs. */

import { element } from "./elements.js";
import "./vendor/purify.min.js"; // sets the global DOMPurify
import { Marked } from "./vendor/marked.esm.js";

const escape = (text) =>
  text.replace(/[&<>"]/g, (letter) => `&#${letter.charCodeAt(0)};`);

// HTML in a text is shown as text, and an image as a link: the page loads nothing for a model.
const markdown = new Marked({
  renderer: {
    html: ({ text, block }) => (block ? `<pre>${escape(text)}</pre>` : escape(text)),
    image: ({ href, text }) => `<a href="${escape(href)}">${escape(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});
const ALLOWED = {
  ALLOWED_TAGS: [
    ..."a blockquote br code del em h1 h2 h3 h4 h5 h6 hr li ol p pre strong".split(" "),
    ..."table tbody td th thead tr ul".split(" "),
  ],
  ALLOWED_ATTR: ["align", "href", "start"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  RETURN_DOM_FRAGMENT: true,
};

export class Answer {
  #root;
  #blocks = []; // { html, block }

  /** @param {HTMLElement} root Where the text is shown. */
  constructor(root) {
    this.#root = root;
  }

  /** Shows tokens. Only blocks that changed since the last call are made anew. */
  show(tokens) {
    const text = tokens.map((token) => token.text).join("");
    const drafted = tokens.map(({ text, by }) => (by === "drafter" ? "d" : "v").repeat(text.length)).join("");
    let start = 0, shown = 0;
    for (const part of markdown.lexer(text)) {
      const end = start + part.raw.length;
      const html = markdown.parser([part]);
      if (html && this.#blocks[shown]?.html !== html) {
        this.#put(shown, html, part.raw, drafted.slice(start, end));
      }
      shown += html ? 1 : 0;
      start = end;
    }
    for (const { block } of this.#blocks.splice(shown)) block.remove();
  }

  #put(index, html, raw, drafted) {
    const block = element("div");
    block.append(DOMPurify.sanitize(html, ALLOWED));
    mark(block, raw, drafted);
    for (const link of block.querySelectorAll("a")) {
      link.target = "_blank";
      link.rel = "noopener noreferrer";
    }
    const old = this.#blocks[index]?.block;
    if (old) old.replaceWith(block);
    else this.#root.append(block);
    this.#blocks[index] = { html, block };
  }
}

/**
 * Wraps what the drafter wrote in spans. The words of the rendered text are found in its source in
 * order, because rendering drops characters but keeps words.
 *
 * @param {HTMLElement} block A rendered block.
 * @param {string} raw Its source.
 * @param {string} drafted For each character of the source, "d" for the drafter or "v".
 */
function mark(block, raw, drafted) {
  const walker = document.createTreeWalker(block, NodeFilter.SHOW_TEXT), nodes = [];
  while (walker.nextNode()) nodes.push(walker.currentNode);
  let at = 0;
  for (const node of nodes) {
    const parts = document.createDocumentFragment();
    let run = "", by = "v";
    const flush = () => {
      if (run) parts.append(by === "d" ? element("span", run, "drafter") : run);
      run = "";
    };
    for (const [word] of node.data.matchAll(/\s+|\S+/g)) {
      const found = word.trim() ? raw.indexOf(word, at) : -1;
      for (let i = 0; i < word.length; i++) {
        const owner = found < 0 ? by : drafted[found + i];
        if (owner !== by) flush();
        by = owner;
        run += word[i];
      }
      if (found >= 0) at = found + word.length;
    }
    flush();
    node.replaceWith(parts);
  }
}
