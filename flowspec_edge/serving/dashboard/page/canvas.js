// What both pictures need of a canvas: sharp lines on any screen, the page's colours, one clock.

const still = matchMedia("(prefers-reduced-motion: reduce)");
const dark = matchMedia("(prefers-color-scheme: dark)");
let colours = null;
dark.addEventListener("change", () => { colours = null; });

/** Whether things are to be shown without being moved. */
export const isStill = () => still.matches;

/** The page's colour of that name (style.css). */
export function colour(name) {
  colours ??= getComputedStyle(document.documentElement);
  return colours.getPropertyValue(`--${name}`);
}

/** A cleared 2d context in CSS pixels, and its size. */
export function cleared(canvas) {
  const width = canvas.clientWidth, height = canvas.clientHeight, scale = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const draw = canvas.getContext("2d");
  draw.setTransform(scale, 0, 0, scale, 0, 0);
  draw.clearRect(0, 0, width, height);
  return { draw, width, height };
}

/** Calls `paint(seconds)` before every frame for as long as it returns true; `wake()` starts it. */
export function painter(paint) {
  let asleep = true;
  function frame(now) {
    asleep = !paint(now / 1000);
    if (!asleep) requestAnimationFrame(frame);
  }
  return function wake() {
    if (asleep) {
      asleep = false;
      requestAnimationFrame(frame);
    }
  };
}
