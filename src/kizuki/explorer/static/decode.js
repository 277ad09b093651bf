// Arrays lie in the file as base64 text, one inert script element each, and are decoded only when asked for.

function bytesOf(text) {
  if (typeof Uint8Array.fromBase64 === "function") return Uint8Array.fromBase64(text);
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i += 1) bytes[i] = raw.charCodeAt(i);
  return bytes;
}

/** What bundle.py packed: base64 of deflated JSON. */
export async function inflated(text) {
  if (typeof DecompressionStream === "undefined") throw new Error("this browser is too old for this page: it has no DecompressionStream");
  return new Response(new Blob([bytesOf(text)]).stream().pipeThrough(new DecompressionStream("deflate"))).json();
}

const KINDS = { f4: Float32Array, i4: Int32Array, u2: Uint16Array };

/** base64 -> typed array. The file is little-endian, like every processor a browser runs on today. */
export function decode(text, kind) {
  const bytes = bytesOf(text.trim());
  const Kind = KINDS[kind];
  if (bytes.byteLength % Kind.BYTES_PER_ELEMENT !== 0) throw new Error(`block of ${bytes.byteLength} bytes is not ${kind}`);
  const whole = bytes.byteOffset === 0 && bytes.byteLength === bytes.buffer.byteLength;
  return new Kind(whole ? bytes.buffer : bytes.slice().buffer);
}

/** The text of block `id`, as soon as the browser has read that far into the file. */
export async function blockText(id) {
  for (;;) {
    const element = document.getElementById(id);
    const loading = document.readyState === "loading";
    if (element && (element.nextElementSibling || !loading)) return element.textContent;
    if (!loading) throw new Error(`this file has no block ${id}; it is incomplete`);
    await new Promise((resume) => setTimeout(resume, 30));
  }
}

export async function block(id, kind, length) {
  const array = decode(await blockText(id), kind);
  if (array.length !== length) throw new Error(`block ${id} has ${array.length} numbers, expected ${length}`);
  return array;
}
