// The cell of a notebook: a frame with the page in it, and the page's questions as messages to the kernel.
// The frame has no origin and no network: its only way out is the port that is handed to it here.

let views = 0;

function render({ model, el }) {
  const view = `${Date.now()} ${(views += 1)}`; // a model may be shown in several cells, and answers go to all of them
  const frame = document.createElement("iframe");
  frame.setAttribute("sandbox", "allow-scripts allow-downloads");
  frame.title = "kizuki";
  frame.style.cssText = `width:100%;height:${model.get("height")}px;border:0;display:block`;
  const { port1: port, port2 } = new MessageChannel();
  const meet = (event) => {
    if (event.source !== frame.contentWindow || event.data !== "kizuki") return;
    frame.contentWindow.postMessage("kizuki", "*", [port2]); // a frame without an origin cannot be named otherwise
    window.removeEventListener("message", meet);
  };
  window.addEventListener("message", meet);
  port.onmessage = ({ data }) => model.send({ ...data, view });
  const answer = (content, buffers) => {
    if (content.view !== view) return;
    if (content.error !== undefined) return port.postMessage({ id: content.id, error: content.error });
    const part = buffers[0]; // a DataView here, an ArrayBuffer there
    const bytes = ArrayBuffer.isView(part) ? new Uint8Array(part.buffer, part.byteOffset, part.byteLength) : new Uint8Array(part);
    const { buffer } = bytes.slice();
    port.postMessage({ id: content.id, buffer }, [buffer]);
  };
  const resize = () => (frame.style.height = `${model.get("height")}px`);
  model.on("msg:custom", answer);
  model.on("change:height", resize);
  frame.srcdoc = model.get("page");
  el.replaceChildren(frame);
  return () => {
    window.removeEventListener("message", meet);
    model.off("msg:custom", answer);
    model.off("change:height", resize);
    port.close();
    frame.remove();
  };
}

export default { render };
