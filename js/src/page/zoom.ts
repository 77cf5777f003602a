/** A window onto a large picture, which is scrolled, dragged, and zoomed by buttons and the wheel with Ctrl. */
import { buttonElement, consume, element, replaceChildren, setAttributes, svgElement } from "./dom";
import { clamp, followPointer, type Size } from "./grid";

/** How much larger a click on a button makes the picture, and how small and large it gets. */
const STEP = 1.25;
const ZOOMS = [0.05, 3] as const;
/** How large the small picture of what fits the width is at most. */
const MAP: Size = { width: 240, height: 48 };
/** What is so close to the border of the window, in pixels, is not seen well. */
const EDGE = 24;

/** @param fits Which sides of a picture *Fit* shows whole. */
export function makeZoomWindow(fits: "width" | "both") {
  let zoom = 1;
  let mapScale = 1;
  let picture: SVGSVGElement | null = null;
  let size: Size = { width: 1, height: 1 };
  const onWheel = (event: WheelEvent) => {
    if (!event.ctrlKey) return;
    consume(event);
    const { left, top } = box.getBoundingClientRect();
    zoomTo(zoom * Math.exp(-event.deltaY / 400), event.clientX - left, event.clientY - top);
  };
  /** Drags the picture with the mouse; a touch scrolls it anyway. */
  const onPointerDown = (event: PointerEvent) => {
    const { clientHeight, clientWidth, scrollLeft, scrollTop } = box;
    const { left, top } = box.getBoundingClientRect();
    const isOnScrollBar = event.clientX - left > clientWidth || event.clientY - top > clientHeight;
    const isOnButton = (event.target as Element).closest("[role=button], button") !== null;
    if (event.pointerType !== "mouse" || event.button !== 0 || isOnButton || isOnScrollBar) return;
    box.classList.add("gp-dragged");
    const move = (x: number, y: number) => box.scrollTo(scrollLeft - x, scrollTop - y);
    followPointer(event, move, () => box.classList.remove("gp-dragged"));
  };
  const box = element("div.gp-zoom-window", {
    onwheel: onWheel,
    onpointerdown: onPointerDown,
    onscroll: () => showSeen(),
  });
  /** What is seen of the picture, on a small one; a click there goes to that place. */
  const map = svgElement("svg.gp-zoom-map", {
    "aria-hidden": true,
    onclick: ({ offsetX, offsetY }: MouseEvent) => {
      const scale = zoom / mapScale;
      box.scrollTo(offsetX * scale - box.clientWidth / 2, offsetY * scale - box.clientHeight / 2);
    },
  });
  const seen = svgElement("rect.gp-zoom-seen");
  const button = (name: string, text: string, onclick: () => void) =>
    buttonElement({ "aria-label": name, title: name, onclick }, text);
  const buttons = element(
    "div.gp-line.gp-tight",
    button("Zoom out", "−", () => zoomTo(zoom / STEP)),
    button("Zoom in", "+", () => zoomTo(zoom * STEP)),
    button(fits === "width" ? "Fit to width" : "Fit the picture", "Fit", () => fit()),
    map,
  );
  /** Shows a picture, whose size is that at zoom 1, where another one was. */
  const show = (shown: SVGSVGElement, own: Size) => {
    const { scrollLeft, scrollTop } = box;
    [picture, size] = [shown, own];
    box.replaceChildren(picture);
    if (fits === "width") {
      const { width, height } = size;
      mapScale = Math.min(MAP.width / width, MAP.height / height);
      const attributes = { viewBox: `0 0 ${width} ${height}`, width: width * mapScale, height: height * mapScale };
      setAttributes(map, attributes);
      const nodes = [...picture.querySelectorAll("[role=button] > rect")].map((node) => node.cloneNode());
      replaceChildren(map, ...nodes, seen);
    }
    resize();
    box.scrollTo(scrollLeft, scrollTop);
  };
  /** Zooms; what is at a place in the window, by default its middle, stays there. */
  const zoomTo = (wanted: number, x = box.clientWidth / 2, y = box.clientHeight / 2) => {
    const { scrollLeft, scrollTop } = box;
    const before = zoom;
    zoom = clamp(wanted, ...ZOOMS);
    resize();
    box.scrollTo(((scrollLeft + x) * zoom) / before - x, ((scrollTop + y) * zoom) / before - y);
  };
  /** Zooms out until the picture is seen whole; `least` keeps texts readable. */
  const fit = (least: number = ZOOMS[0]) => {
    const { clientWidth, clientHeight } = box;
    const whole = Math.min(1, clientWidth / size.width, fits === "both" ? clientHeight / size.height : 1);
    zoomTo(Math.max(least, whole));
    box.scrollTo(0, 0);
  };
  /** Scrolls to a place of the picture, unless it is seen. */
  const reveal = (x: number, y: number) => {
    const { clientWidth, clientHeight, scrollLeft, scrollTop } = box;
    const [left, top] = [x * zoom - scrollLeft, y * zoom - scrollTop];
    const isSeen = left > EDGE && left < clientWidth - EDGE && top > EDGE && top < clientHeight - EDGE;
    if (!isSeen) box.scrollTo(x * zoom - clientWidth / 2, y * zoom - clientHeight / 2);
  };
  const resize = () => {
    if (picture !== null) setAttributes(picture, { width: size.width * zoom, height: size.height * zoom });
    showSeen();
  };
  const showSeen = () => {
    const { clientWidth, clientHeight, scrollLeft, scrollTop, scrollWidth, scrollHeight } = box;
    const isWhole = scrollWidth <= clientWidth + 1 && scrollHeight <= clientHeight + 1;
    map.toggleAttribute("hidden", fits !== "width" || isWhole);
    const [x, y] = [scrollLeft / zoom, scrollTop / zoom];
    setAttributes(seen, { x, y, width: clientWidth / zoom, height: clientHeight / zoom });
  };
  new ResizeObserver(showSeen).observe(box);
  return { element: box, buttons, show, fit, reveal };
}
