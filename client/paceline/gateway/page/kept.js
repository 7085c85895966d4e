/** What a reload of this tab keeps: it stays in the browser, until the tab is closed. */

/** Keeps a value; without trees where it would be too large. What even so is too large is not kept. */
export function keep(name, value) {
  for (const leaveOut of [[], ["rounds", "steps"]]) {
    const text = JSON.stringify(value, (key, part) => (leaveOut.includes(key) ? undefined : part));
    try {
      sessionStorage.setItem(name, text);
      return;
    } catch {
      // The browser's limit is reached, or it keeps nothing.
    }
  }
  forget(name);
}

/** A kept value; null if there is none. */
export function kept(name) {
  try {
    return JSON.parse(sessionStorage.getItem(name));
  } catch {
    return null;
  }
}

/** Drops a kept value. */
export function forget(name) {
  try {
    sessionStorage.removeItem(name);
  } catch {
    // The browser keeps nothing.
  }
}
