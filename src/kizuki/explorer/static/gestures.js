// Mouse, pen and touch on the matrix: hover previews, a click chooses, dragging pans, pinching or
// scrolling zooms, twice quickly zooms in. The wheel zooms only once the picture has the focus, so that the page still scrolls.

const TWICE = 350; // milliseconds between two taps that are one gesture

export function attachGestures(map) {
  const { canvas } = map;
  const down = new Map(); // pointer id -> place
  let moved = 0;
  let spread = 0;
  let steering = false; // the pointer moves the frame on the small picture
  let tapped = 0;

  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  };
  const hover = (cell) => {
    const same = cell && map.hovered && cell.query === map.hovered.query && cell.key === map.hovered.key;
    if (same || (!cell && !map.hovered)) return;
    map.hovered = cell;
    map.on.hover(cell);
    map.draw();
  };
  const gap = () => {
    const [a, b] = [...down.values()];
    return Math.hypot(a.x - b.x, a.y - b.y);
  };

  canvas.addEventListener("pointerdown", (event) => {
    canvas.focus({ preventScroll: true });
    down.set(event.pointerId, place(event));
    moved = 0;
    steering = down.size === 1 && map.overMini(place(event).x, place(event).y);
    if (steering) map.goMini(place(event).x, place(event).y);
    if (down.size === 2) spread = gap();
    canvas.setPointerCapture(event.pointerId);
  });

  canvas.addEventListener("pointermove", (event) => {
    const now = place(event);
    const before = down.get(event.pointerId);
    if (!before) {
      if (event.pointerType !== "touch") hover(map.cellAt(now.x, now.y));
      return;
    }
    down.set(event.pointerId, now);
    moved += Math.hypot(now.x - before.x, now.y - before.y);
    if (steering && down.size === 1) map.goMini(now.x, now.y);
    else if (down.size === 2) {
      const [a, b] = [...down.values()];
      const next = gap();
      map.zoom(next / spread, (a.x + b.x) / 2, (a.y + b.y) / 2);
      spread = next;
    } else if (moved > 4) {
      map.setView(map.view.x - (now.x - before.x) / map.cellSize, map.view.y - (now.y - before.y) / map.cellSize, map.view.size);
    }
  });

  const up = (event) => {
    const single = down.size === 1;
    if (down.delete(event.pointerId) && single && !steering && event.type === "pointerup" && moved <= 4) {
      const { x, y } = place(event);
      const cell = map.cellAt(x, y, true);
      const again = event.timeStamp - tapped < TWICE && map.cellAt(x, y) !== null;
      tapped = again ? 0 : event.timeStamp;
      if (again) map.zoom(2, x, y);
      else if (cell) map.on.choose(cell);
    }
  };
  canvas.addEventListener("pointerup", up);
  canvas.addEventListener("pointercancel", up);
  // one finger may scroll the page where the whole matrix is seen; two are ours, or the browser takes them away
  canvas.addEventListener("touchmove", (event) => {
    if (event.touches.length > 1 && event.cancelable) event.preventDefault();
  }, { passive: false });
  canvas.addEventListener("pointerleave", () => hover(null));
  canvas.addEventListener("wheel", (event) => {
    if (document.activeElement !== canvas && !event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const { x, y } = place(event);
    map.zoom(Math.exp(-Math.max(-120, Math.min(120, event.deltaY)) / 300), x, y);
  }, { passive: false });
}
