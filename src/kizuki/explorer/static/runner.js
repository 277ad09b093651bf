// Runs the engine in a worker made from this file's own text; where the browser refuses one, in slices here.
import { Engine } from "./engine.js";

export function startEngine(source, receive) {
  try {
    const address = URL.createObjectURL(new Blob([source], { type: "text/javascript" }));
    const worker = new Worker(address);
    URL.revokeObjectURL(address);
    let sliced = null;
    let last = null; // the request that a failed worker must hand over
    worker.onmessage = (event) => receive(event.data);
    worker.onerror = (event) => {
      event.preventDefault();
      worker.terminate();
      sliced = sliceEngine(receive);
      if (last) sliced.send(last);
    };
    return {
      inWorker: true,
      send: (sent) => {
        const message = withParts(sent);
        if (message.type === "open") last = message;
        if (sliced) sliced.send(message);
        else worker.postMessage(message);
      },
    };
  } catch {
    return sliceEngine(receive); // some browsers allow no worker in a local file
  }
}

function sliceEngine(receive) {
  const engine = new Engine((message) => receive(message));
  let running = false;
  const slice = () => {
    engine.step();
    if (engine.busy) setTimeout(slice, 4);
    else running = false;
  };
  return {
    inWorker: false,
    send: (message) => {
      engine.receive(withParts(message));
      if (!running) {
        running = true;
        setTimeout(slice, 0);
      }
    },
  };
}

/** An opened head as the numbers it is made of, which can be posted to a worker. */
function withParts(message) {
  if (message.type !== "open" || message.parts) return message;
  const { queries, keys, dim, q, k, lse, first, stop, scale, softcap, sink } = message.head.model;
  return { type: "open", id: message.id, parts: { queries, keys, dim, q, k, lse, first, stop, scale, softcap, sink } };
}
