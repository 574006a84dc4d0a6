// Loads a library when it is first needed.

/** A function that returns the library, or null while it loads; then `ready` is called once. `load`
    imports it. A library that cannot be loaded is never ready: the page shows plain text. */
export function library(load) {
  let found = null;
  let loading = null;
  const waiting = new Set();
  return (ready) => {
    if (found) return found;
    if (ready) waiting.add(ready);
    loading ??= load().then((made) => {
      found = made;
      for (const one of waiting) one();
      waiting.clear();
    }, console.error);
    return null;
  };
}
