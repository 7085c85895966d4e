import { element } from "./elements.js";

/** A text as it is, a span a token, with the class of who proposed it. */
export class TokenText {
  #root;
  #shown = 0;

  /** @param {HTMLElement} root Where the text is shown. */
  constructor(root) {
    this.#root = root;
  }

  /** Shows the first tokens, as many as `count`. */
  show(tokens, count = tokens.length) {
    for (; this.#shown > count; this.#shown--) this.#root.lastChild.remove();
    for (; this.#shown < count; this.#shown++) {
      const { text, by } = tokens[this.#shown];
      this.#root.append(element("span", text, by));
    }
    // The end of a text may have come later than its last token.
    if (count) this.#root.lastChild.textContent = tokens[count - 1].text;
  }
}
