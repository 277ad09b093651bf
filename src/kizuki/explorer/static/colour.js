// One sequential colour map, generated from a formula in OKLCH: lightness falls (light theme) or
// rises (dark theme) steadily with the value, so it reads the same to colour-blind eyes and in grey.

const STEPS = 256;

// What the maps are made of, each number as [at t = 0, change to t = 1]; explorer/colour.py reads this very line, so
// that figures saved from Python have the page's colours.
const MAPS = {"light": {"lightness": [0.985, -0.7], "hue": [105, 175]}, "dark": {"lightness": [0.235, 0.7], "hue": [290, -190]}, "chroma": [0.02, 0.145], "bow": [0.12, 0.76], "ground": 0.2};

function oklchToRgb(lightness, chroma, hueDegrees) {
  const hue = (hueDegrees * Math.PI) / 180;
  const a = chroma * Math.cos(hue);
  const b = chroma * Math.sin(hue);
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const linear = [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ];
  return linear.map((x) => {
    const c = Math.min(1, Math.max(0, x));
    return Math.round(255 * (c <= 0.0031308 ? 12.92 * c : 1.055 * c ** (1 / 2.4) - 0.055));
  });
}

/** 256 colours as bytes [r, g, b] * 256; entry 0 is the panel's own background, so nothing is painted there. */
export function colourTable(dark) {
  const table = new Uint8Array(STEPS * 3);
  const map = dark ? MAPS.dark : MAPS.light;
  for (let step = 0; step < STEPS; step += 1) {
    const t = step / (STEPS - 1);
    const lightness = map.lightness[0] + map.lightness[1] * t;
    const chroma = MAPS.chroma[0] + MAPS.chroma[1] * Math.sin(Math.PI * Math.min(1, MAPS.bow[0] + MAPS.bow[1] * t));
    const hue = map.hue[0] + map.hue[1] * t;
    table.set(oklchToRgb(lightness, chroma * (t === 0 ? MAPS.ground : 1), hue), 3 * step);
  }
  return table;
}

export function cssColour(table, t) {
  const step = 3 * Math.round(255 * Math.min(1, Math.max(0, t)));
  return `rgb(${table[step]},${table[step + 1]},${table[step + 2]})`;
}

/** Black or white, whichever is easier to read on table colour t. */
export function inkOn(table, t) {
  const step = 3 * Math.round(255 * Math.min(1, Math.max(0, t)));
  const [r, g, b] = [0, 1, 2].map((n) => {
    const c = table[step + n] / 255;
    return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  });
  const light = 0.2126 * r + 0.7152 * g + 0.0722 * b;
  // The contrast ratios of WCAG 2 with white and with black: the better one is never below 4.58.
  return 1.05 / (light + 0.05) > (light + 0.05) / 0.05 ? "#fff" : "#000";
}

export const FLOOR = 1e-4; // the smallest weight the logarithmic scale still paints
export const LINEAR_FLOOR = 1 / 256; // the smallest weight the linear scale can tell from nothing

/** Weight -> 0..1 along the map. The two scales are fixed, so a colour means the same at every step. */
export function weightScale(kind) {
  if (kind === "linear") return { kind, floor: LINEAR_FLOOR, at: (w) => (w >= LINEAR_FLOOR ? w : 0), ticks: [0, 0.25, 0.5, 0.75, 1] };
  const span = -Math.log10(FLOOR);
  // 0.06: the faintest painted weight is still visible beside "not painted"
  const at = (w) => (w >= FLOOR ? 0.06 + 0.94 * Math.min(1, 1 + Math.log10(w) / span) : 0);
  return { kind: "log", floor: FLOOR, at, ticks: [1e-4, 1e-3, 1e-2, 1e-1, 1] };
}

/** 256 colours from −1 (blue) through 0 (the panel's background) to +1 (orange), told apart by colour-blind eyes
    and, both ways, by lightness. */
export function signedTable(dark) {
  const table = new Uint8Array(STEPS * 3);
  for (let step = 0; step < STEPS; step += 1) {
    const t = (2 * step) / (STEPS - 1) - 1;
    const size = Math.abs(t);
    const lightness = dark ? 0.235 + 0.56 * size : 0.985 - 0.5 * size;
    table.set(oklchToRgb(lightness, 0.15 * size ** 0.75, t < 0 ? 255 : 55), 3 * step);
  }
  return table;
}

/** The colour of t in −1..1. */
export function signedColour(table, t) {
  return cssColour(table, (t + 1) / 2);
}
