/** A text as Markdown in which each token is marked with who proposed it. Nothing in the text runs. */

import { copyButton, element } from "./elements.js";
import { tokenSpan } from "./tokens.js";
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
  ALLOWED_ATTR: ["align", "class", "href", "start"], // classes name the languages of code
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
    const owners = tokens.flatMap(({ text, by, index }) => Array(text.length).fill({ by, index }));
    let start = 0, shown = 0;
    for (const part of markdown.lexer(text)) {
      const end = start + part.raw.length;
      const html = markdown.parser([part]);
      if (html && this.#blocks[shown]?.html !== html) {
        this.#put(shown, html, part.raw, owners.slice(start, end));
      }
      shown += html ? 1 : 0;
      start = end;
    }
    for (const { block } of this.#blocks.splice(shown)) block.remove();
  }

  #put(index, html, raw, owners) {
    const block = element("div");
    block.append(DOMPurify.sanitize(html, ALLOWED));
    mark(block, raw, owners);
    for (const link of block.querySelectorAll("a")) {
      link.target = "_blank";
      link.rel = "noopener noreferrer";
    }
    for (const code of block.querySelectorAll("pre > code")) {
      const bar = element("div", "", "bar");
      bar.append(element("span", code.className.replace("language-", "")), copyButton(() => code.textContent));
      code.removeAttribute("class");
      code.parentElement.before(bar);
    }
    const old = this.#blocks[index]?.block;
    if (old) old.replaceWith(block);
    else this.#root.append(block);
    this.#blocks[index] = { html, block };
  }
}

/**
 * Wraps tokens in spans. The words of the rendered text are found in its source in
 * order, because rendering drops characters but keeps words.
 *
 * @param {HTMLElement} block A rendered block.
 * @param {string} raw Its source.
 * @param {{by: string, index: number}[]} owners The token of each character of the source.
 */
function mark(block, raw, owners) {
  const walker = document.createTreeWalker(block, NodeFilter.SHOW_TEXT), nodes = [];
  while (walker.nextNode()) nodes.push(walker.currentNode);
  let at = 0;
  for (const node of nodes) {
    const parts = document.createDocumentFragment();
    let run = "", token = owners[at];
    const flush = () => {
      if (run) parts.append(token ? tokenSpan(run, token.by, token.index) : run);
      run = "";
    };
    for (const [word] of node.data.matchAll(/\s+|\S+/g)) {
      const start = word.trim() ? raw.indexOf(word, at) : raw.startsWith(word, at) ? at : -1;
      for (let i = 0; i < word.length; i++) {
        const owner = start < 0 ? token : owners[start + i];
        if (owner?.index !== token?.index) flush();
        token = owner;
        run += word[i];
      }
      if (start >= 0) at = start + word.length;
    }
    flush();
    node.replaceWith(parts);
  }
}
