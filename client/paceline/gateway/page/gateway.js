/** Requests to the gateway that serves this page. */

export class GatewayError extends Error {
  /**
   * @param {string} message What the gateway says.
   * @param {number} status HTTP status; 0 without a response.
   */
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export class Gateway {
  #settings;

  /** @param {{key: string}} settings Has the API key, also one that a program filled in; empty: none. */
  constructor(settings) {
    this.#settings = settings;
  }

  /**
   * The served model: name, context, drafters, and whether it has a chat template. Of several it is
   * one that is loaded, or else the first, of which only the name is known.
   */
  async model() {
    const { data } = await (await this.#ask("v1/models")).json();
    const model = data.find(({ status }) => status?.value === "loaded") ?? data[0];
    return { chat_template: true, drafters: [], ...model };
  }

  /** The events of a streamed completion. */
  async *stream(path, body, signal) {
    const response = await this.#ask(path, { method: "POST", body: JSON.stringify(body), signal });
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    while (true) {
      const { value, done } = await reader.read().catch(lost);
      if (done) throw new GatewayError("The connection ended before the text did.");
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        if (!block.startsWith("data: ")) continue; // a comment that keeps the connection
        if (block === "data: [DONE]") return;
        const event = JSON.parse(block.slice("data: ".length));
        if (event.error) throw new GatewayError(event.error.message);
        yield event;
      }
    }
  }

  async #ask(path, options = {}) {
    const headers = { "Content-Type": "application/json" };
    const { key } = this.#settings;
    if (key) headers.Authorization = `Bearer ${key}`;
    const response = await fetch(path, { ...options, headers }).catch(lost);
    if (response.ok) return response;
    const body = await response.json().catch(() => ({}));
    const { code, param, message = `The gateway answered ${response.status}.` } = body.error ?? {};
    if (code === "context_length_exceeded" && param !== "max_tokens") {
      throw new GatewayError("The context is full: there is no room for an answer. Shorten the message, or begin a new chat.", response.status);
    }
    throw new GatewayError(message, response.status);
  }
}

/** Names a failed connection plainly. An abort stays what it is. */
function lost(error) {
  if (error.name === "AbortError") throw error;
  throw new GatewayError("The gateway cannot be reached. Is it running?");
}
