// Which conversations have the words that a person looks for.

const AROUND = 30; // characters before a word that is shown where it was found

/** Where a conversation has all words of the query: "" if its title has them, a piece of the
    message that has the first one, or null if a word is nowhere. */
export function find(conversation, query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  const texts = conversation.messages.flatMap(({ content, files }) => [content, ...(files ?? []).flatMap(({ name, text }) => [name, text])]);
  const title = conversation.title.toLowerCase();
  const lower = texts.map((text) => text.toLowerCase());
  if (!words.every((word) => title.includes(word) || lower.some((text) => text.includes(word)))) return null;
  if (words.every((word) => title.includes(word))) return "";
  const word = words.find((one) => !title.includes(one));
  const number = lower.findIndex((text) => text.includes(word));
  const at = lower[number].indexOf(word);
  const from = Math.max(0, at - AROUND);
  return `${from ? "…" : ""}${texts[number].slice(from, at + 3 * AROUND).replace(/\s+/g, " ").trim()}`;
}
