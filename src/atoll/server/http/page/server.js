// Requests to the server, with the reader's token in a header; and its stream of events.

const KEY = "atoll.reader";

export class NeedsToken extends Error {}
export class Gone extends Error {}

export function takeToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given === null) return;
  keepToken(given);
  history.replaceState(null, "", location.pathname + location.search); // so that no one reads it off the address
}

export function keepToken(token) {
  sessionStorage.setItem(KEY, token.trim());
}

// A command with the address at which this page was reached: another machine may run it.
export function reached(command, { address, public_address, stored }) {
  const here = new URL(".", location.href).href.replace(/\/$/, ""); // with the path of a gateway
  return stored || !address ? command : command.replaceAll(address, public_address || here);
}

async function ask(path, options = {}) {
  const token = sessionStorage.getItem(KEY);
  const headers = { ...(options.headers || {}), ...(token ? { Authorization: `Bearer ${token}` } : {}) };
  const answer = await fetch(path, { ...options, headers, cache: "no-store" });
  if (answer.ok) return answer;
  const said = await answer.json().catch(() => ({ message: `The server answers with status ${answer.status}.` }));
  const text = `${said.message} ${said.remedy || ""}`.trim();
  if (answer.status === 401 || answer.status === 403) {
    sessionStorage.removeItem(KEY);
    throw new NeedsToken(token ? text : "");
  }
  throw answer.status === 410 ? new Gone(text) : new Error(text);
}

export async function getJSON(path) {
  return (await ask(path)).json();
}

// What a path answers, and the characters of the answer.
export async function getSized(path) {
  const text = await (await ask(path)).text();
  return [JSON.parse(text), text.length];
}

// Ask for a file with the token in a header, and give it to the browser to save.
export async function download(path, name) {
  save(name, await (await ask(path)).blob());
}

export function save(name, content) {
  const link = document.createElement("a");
  Object.assign(link, { href: URL.createObjectURL(content), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

// Give each page of events to `onPage`, until the stream ends or breaks.
export async function follow(after, onPage) {
  const query = after === null ? "last=1000" : `after=${after}`;
  const answer = await ask(`v1/events?${query}`, { headers: { Accept: "text/event-stream" } });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += value;
    const messages = rest.split("\n\n");
    rest = messages.pop();
    for (const message of messages) {
      const line = message.split("\n").find((each) => each.startsWith("data: "));
      if (line) onPage(JSON.parse(line.slice(6)));
    }
  }
}
