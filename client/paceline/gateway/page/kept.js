/** What this browser keeps: settings and the open chat of a tab until it is closed, and all chats. */

const CHATS = "chats", OF_TAB = "sessionStorage", OF_ALL = "localStorage";

/** Keeps a value; without trees where it would be too large. Whether it is kept. */
export function keep(name, value, where = OF_TAB) {
  for (const leaveOut of [[], ["rounds", "steps"]]) {
    const text = JSON.stringify(value, (key, part) => (leaveOut.includes(key) ? undefined : part));
    try {
      window[where].setItem(name, text);
      return true;
    } catch {
      // The browser's limit is reached, or it keeps nothing.
    }
  }
  return false;
}

/** A kept value; null if there is none. */
export function kept(name, where = OF_TAB) {
  try {
    return JSON.parse(window[where].getItem(name));
  } catch {
    return null;
  }
}

/** `{ id, title }` of all chats, the newest first. */
export const chats = () => kept(CHATS, OF_ALL) ?? [];

/** Turns of a chat; none if it is not kept. */
export const turnsOf = (id) => kept(`chat ${id}`, OF_ALL) ?? [];

/** Keeps a chat; whether it is kept. */
export function keepChat(id, turns) {
  const others = chats().filter((chat) => chat.id !== id);
  const title = turns[0].content.slice(0, 60);
  return keep(`chat ${id}`, turns, OF_ALL) && keep(CHATS, [{ id, title }, ...others], OF_ALL);
}

export function deleteChat(id) {
  keep(CHATS, chats().filter((chat) => chat.id !== id), OF_ALL);
  try {
    localStorage.removeItem(`chat ${id}`);
  } catch {
    // The browser keeps nothing.
  }
}
