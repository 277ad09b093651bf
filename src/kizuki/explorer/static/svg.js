// A drawing context that writes SVG: what the panels draw on a canvas, drawn once more as a vector picture.

const escape = (text) => String(text).replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);
const round = (n) => Number(n.toFixed(2));

/** The part of CanvasRenderingContext2D that the panels use. Canvases drawn into it become embedded images. */
export class SvgContext {
  constructor() {
    this.parts = [];
    this.stack = [];
    this.measure = document.createElement("canvas").getContext("2d");
    Object.assign(this, { fillStyle: "#000", strokeStyle: "#000", lineWidth: 1, globalAlpha: 1, font: "12px sans-serif", textAlign: "left", textBaseline: "middle", moved: "", open: 0 });
    this.path = "";
  }

  add(name, attributes, inside = null) {
    const moved = this.moved ? ` transform="${this.moved.trim()}"` : "";
    const faint = this.globalAlpha < 1 ? ` opacity="${this.globalAlpha}"` : "";
    const list = Object.entries(attributes).map(([key, value]) => ` ${key}="${typeof value === "number" ? round(value) : escape(value)}"`).join("");
    this.parts.push(inside === null ? `<${name}${list}${moved}${faint}/>` : `<${name}${list}${moved}${faint}>${escape(inside)}</${name}>`);
  }

  save() {
    const { fillStyle, strokeStyle, lineWidth, globalAlpha, font, textAlign, textBaseline, moved } = this;
    this.stack.push({ fillStyle, strokeStyle, lineWidth, globalAlpha, font, textAlign, textBaseline, moved, opened: this.open });
    this.open = 0;
  }

  restore() {
    this.parts.push("</svg></g>".repeat(this.open));
    const { opened, ...kept } = this.stack.pop();
    Object.assign(this, kept, { open: opened });
  }

  translate(x, y) {
    this.moved += ` translate(${round(x)} ${round(y)})`;
  }

  rotate(angle) {
    this.moved += ` rotate(${round((180 * angle) / Math.PI)})`;
  }

  clearRect() {}

  fillRect(x, y, width, height) {
    this.add("rect", { x, y, width, height, fill: this.fillStyle });
  }

  strokeRect(x, y, width, height) {
    this.add("rect", { x, y, width, height, fill: "none", stroke: this.strokeStyle, "stroke-width": this.lineWidth });
  }

  beginPath() {
    this.path = "";
  }

  moveTo(x, y) {
    this.path += `M${round(x)} ${round(y)}`;
  }

  lineTo(x, y) {
    this.path += `L${round(x)} ${round(y)}`;
  }

  /** The only shape that clip() knows. */
  rect(x, y, width, height) {
    this.box = [x, y, width, height].map(round);
    this.path += `M${round(x)} ${round(y)}h${round(width)}v${round(height)}h${round(-width)}Z`;
  }

  fill() {
    this.add("path", { d: this.path, fill: this.fillStyle });
  }

  stroke() {
    this.add("path", { d: this.path, fill: "none", stroke: this.strokeStyle, "stroke-width": this.lineWidth });
  }

  clip() {
    const [x, y, width, height] = this.box; // a picture within the picture shows what lies inside
    this.parts.push(`<g transform="${this.moved.trim()}"><svg x="${x}" y="${y}" width="${width}" height="${height}" viewBox="${x} ${y} ${width} ${height}">`);
    this.moved = "";
    this.open += 1;
  }

  createPattern(canvas) {
    const image = canvas.getContext("2d").getImageData(0, 0, 1, 1).data; // a hatch becomes its ground
    return `rgb(${image[0]},${image[1]},${image[2]})`;
  }

  measureText(text) {
    this.measure.font = this.font;
    return this.measure.measureText(text);
  }

  fillText(text, x, y) {
    const [, size, family] = /^(?:bold )?([\d.]+)px (.*)$/.exec(this.font);
    this.add("text", {
      x, y, fill: this.fillStyle, "font-size": Number(size), "font-family": family, "xml:space": "preserve", ...(this.font.startsWith("bold") ? { "font-weight": "bold" } : {}),
      "text-anchor": { left: "start", center: "middle", right: "end" }[this.textAlign], dy: { middle: "0.35em", top: "0.8em" }[this.textBaseline] ?? "0",
    }, text);
  }

  drawImage(canvas, x, y, width = canvas.width, height = canvas.height) {
    this.add("image", { x, y, width, height, href: canvas.toDataURL(), preserveAspectRatio: "none", style: "image-rendering:pixelated" });
  }

  text(width, height, background) {
    // the name of the language is an address that nobody loads; the browser knows it, and the page names no address
    const language = new DOMParser().parseFromString("<svg></svg>", "text/html").querySelector("svg").namespaceURI;
    return `<svg xmlns="${language}" width="${round(width)}" height="${round(height)}" viewBox="0 0 ${round(width)} ${round(height)}"><rect width="100%" height="100%" fill="${background}"/>${this.parts.join("")}</svg>`;
  }
}
