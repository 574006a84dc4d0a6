// A person's message as the model gets it: the attached files, then the text.

/** A file as Markdown: its name, and its text in a fence that the text does not contain. */
export function fileText({ name, text }) {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([run]) => run.length));
  const fence = "`".repeat(longest + 1);
  return `${name}\n${fence}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
}

export function userText({ content, files }) {
  return [...(files ?? []).map(fileText), content].filter(Boolean).join("\n\n");
}
