// What this script does as a worker: answer messages between slices, so that a stale request never delays a new one.
import { Engine } from "./engine.js";

export function work() {
  const engine = new Engine((message, transfer) => self.postMessage(message, transfer));
  const channel = new MessageChannel();
  let running = false;
  channel.port1.onmessage = () => {
    engine.step();
    if (engine.busy) channel.port2.postMessage(0);
    else running = false;
  };
  self.onmessage = (event) => {
    engine.receive(event.data);
    if (engine.busy && !running) {
      running = true;
      channel.port2.postMessage(0);
    }
  };
}
