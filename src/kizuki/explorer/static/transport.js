// Questions to Python and answers as arrays: over HTTP, or as messages to a notebook's kernel.
//
// An answer is one block of bytes, little-endian: the length of a JSON text (uint32), that text, and the arrays
// it lists, each at a multiple of 8 bytes from the beginning.

const KINDS = { f4: Float32Array, i4: Int32Array, f8: Float64Array };

/** The fields of the JSON text, and each array under its own name. */
export function unpack(buffer) {
  const size = new DataView(buffer).getUint32(0, true);
  const { arrays = [], floats = [], ...fields } = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)));
  let at = 4 + size;
  for (const [name, kind, length] of arrays) {
    at = Math.ceil(at / 8) * 8;
    fields[name] = new KINDS[kind](buffer, at, length);
    at += length * KINDS[kind].BYTES_PER_ELEMENT;
  }
  const { floats: values, ...rest } = fields; // numbers that JSON may not have: infinities, NaN
  return Object.assign(rest, Object.fromEntries(floats.map((name, i) => [name, values[i]])));
}

/** Ask the server that this page came from; its token is in the page's own address. */
export function http() {
  return {
    async ask(what, parameters, signal) {
      const address = `data/${what}?${new URLSearchParams(parameters)}`;
      const answer = await fetch(address, { signal, cache: "no-store", credentials: "omit", referrerPolicy: "no-referrer" });
      const buffer = await answer.arrayBuffer();
      if (!answer.ok) throw new Error(new TextDecoder().decode(buffer));
      return unpack(buffer);
    },
  };
}

/** Ask the notebook's kernel through the port that the cell's output hands to this frame. */
export async function messages() {
  const port = await new Promise((resolve) => {
    window.addEventListener("message", (event) => event.source === window.parent && event.ports[0] && resolve(event.ports[0]), { once: true });
    window.parent.postMessage("kizuki", "*"); // holds nothing: it only says that this frame listens now
  });
  return overPort(port);
}

const UNDER_WAY = 2; // questions sent and not yet answered: what still waits here can be taken back at no cost

/** Questions over a MessagePort: { id, what, parameters } there, { id, buffer } or { id, error } back. */
export function overPort(port) {
  const waiting = new Map(); // in the order in which they were asked
  const sent = new Set(); // of those taken back, too, until they are answered
  let last = 0;
  const sendMore = () => {
    for (const [id, { question }] of waiting) {
      if (sent.size >= UNDER_WAY) return;
      if (sent.has(id)) continue;
      sent.add(id);
      port.postMessage({ id, ...question });
    }
  };
  port.onmessage = ({ data: { id, buffer, error } }) => {
    const asked = waiting.get(id);
    waiting.delete(id);
    sent.delete(id);
    sendMore();
    if (!asked) return; // it was taken back meanwhile
    if (error === undefined) asked.resolve(unpack(buffer));
    else asked.reject(new Error(error));
  };
  return {
    ask(what, parameters, signal) {
      return new Promise((resolve, reject) => {
        if (signal?.aborted) return reject(signal.reason);
        const id = (last += 1);
        waiting.set(id, { resolve, reject, question: { what, parameters } });
        signal?.addEventListener("abort", () => waiting.delete(id) && reject(signal.reason));
        sendMore();
      });
    },
  };
}

/** The same questions about the other input, where the page has two. */
export function ofOther(transport) {
  return { ask: (what, parameters, signal) => transport.ask(`other.${what}`, parameters, signal) };
}
