import { element } from "./elements.js";

/** A text as it is, a span a token, with the class of who proposed it. */
export class TokenText {
  #root;
  #shown = 0;

  /** @param {HTMLElement} root Where the text is shown. */
  constructor(root) {
    this.#root = root;
  }

  /** Shows the tokens; those of an earlier call stay. */
  show(tokens) {
    for (; this.#shown < tokens.length; this.#shown++) {
      const { text, by, index } = tokens[this.#shown];
      this.#root.append(tokenSpan(text, by, index));
    }
    // The end of a text may have come later than its last token.
    if (tokens.length) this.#root.lastChild.textContent = tokens.at(-1).text;
  }
}

/** A part of the token with this index. */
export function tokenSpan(text, by, index) {
  const span = element("span", text, by);
  span.dataset.token = index;
  if (!text.trim()) span.classList.add("blank"); // an underlined indentation would look like a gap to fill
  return span;
}

/**
 * Shows in a panel the step of the token below the pointer; a click picks it.
 *
 * @param {HTMLElement} root Where tokens are shown.
 * @param {Run} run Their run.
 * @param {Panel} panel The panel.
 * @param {() => void} show Shows the run in the panel.
 */
export function linkTokens(root, run, panel, show) {
  const stepOf = (span) => run.tokens[span?.dataset.token]?.step ?? null;
  root.addEventListener("pointerover", ({ target }) => {
    const span = target.closest("[data-token]");
    if (!span) return;
    show();
    panel.preview(stepOf(span));
    span.title = panel.title;
  });
  root.addEventListener("pointerleave", () => panel.preview(null));
  root.addEventListener("click", ({ target }) => {
    const span = target.closest("[data-token]");
    if (span) panel.pick(stepOf(span));
  });
}
