// Conversations, kept in this browser: IndexedDB, or memory where that is not allowed. Tabs tell each
// other what they have changed.
//
// A conversation is {id, title, named, updated, model, options, messages}; a message is {role, content}; a
// person's may have {files}, each {name, text}; an answer has {reasoning, tool_calls, model, finish, error, usage, first_s, total_s}.

import { SERVER } from "./api.js";

const TABLE = "conversations";

function open() {
  return new Promise((resolve, reject) => {
    const opening = indexedDB.open(SERVER, 1);
    opening.onupgradeneeded = () => opening.result.createObjectStore(TABLE, { keyPath: "id" });
    opening.onsuccess = () => resolve(opening.result);
    opening.onerror = () => reject(opening.error);
  });
}

export class Store {
  #db = null;
  #memory = new Map();
  #tabs = new BroadcastChannel(`${SERVER} conversations`);

  /** `changed({id, isFinal})` is called when another tab has changed or deleted a conversation; not
      final: an answer to it is still growing. */
  set onchange(changed) {
    this.#tabs.onmessage = ({ data }) => changed(data);
  }

  /** Ready to use; what is kept comes with `all`. */
  static async open() {
    const store = new Store();
    try {
      store.#db = await open();
    } catch {
      // a window that keeps nothing
    }
    return store;
  }

  /** Latest first. */
  async all() {
    const found = this.#db ? await this.#run("readonly", (table) => table.getAll()) : [...this.#memory.values()];
    return found.sort((a, b) => b.updated - a.updated);
  }

  async get(id) {
    return this.#db ? this.#run("readonly", (table) => table.get(id)) : this.#memory.get(id);
  }

  async put(conversation, isFinal = true) {
    const copy = structuredClone(conversation);
    if (this.#db) await this.#run("readwrite", (table) => table.put(copy));
    else this.#memory.set(copy.id, copy);
    this.#tabs.postMessage({ id: copy.id, isFinal });
  }

  async delete(id) {
    if (this.#db) await this.#run("readwrite", (table) => table.delete(id));
    else this.#memory.delete(id);
    this.#tabs.postMessage({ id, isFinal: true });
  }

  #run(mode, act) {
    return new Promise((resolve, reject) => {
      const transaction = this.#db.transaction(TABLE, mode);
      const opening = act(transaction.objectStore(TABLE));
      transaction.oncomplete = () => resolve(opening.result);
      transaction.onabort = transaction.onerror = () => reject(transaction.error ?? opening.error);
    });
  }
}

/** A small value kept beside the conversations. */
export function kept(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(`${SERVER} ${name}`)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

export function keep(name, value) {
  try {
    localStorage.setItem(`${SERVER} ${name}`, JSON.stringify(value));
  } catch {
    // it lasts as long as the page
  }
}
