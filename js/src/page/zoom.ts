/** A window onto a large picture, which is scrolled, dragged, and zoomed by buttons and the wheel with Ctrl. */
import { buttonElement, consume, element, replaceChildren, setAttribute, svgElement } from "./dom";
import { clamp, type Size } from "./grid";

/** How much larger a click on a button makes the picture, and how small and large it gets. */
const STEP = 1.25;
const ZOOMS = [0.05, 3] as const;
/** How large the small picture of what fits the width is at most. */
const MAP: Size = { width: 240, height: 48 };
/** What is so close to the border of the window, in pixels, is not seen well. */
const EDGE = 24;

export class ZoomWindow {
  readonly element = element("div.gp-zoom-window", {
    onwheel: (event: WheelEvent) => this.onWheel(event),
    onpointerdown: (event: PointerEvent) => this.onPointerDown(event),
    onscroll: () => this.showSeen(),
  });
  /** What is seen of the picture, on a small one; a click there goes to that place. */
  private readonly map = svgElement("svg.gp-zoom-map", {
    "aria-hidden": true,
    onclick: ({ offsetX, offsetY }: MouseEvent) => {
      const scale = this.zoom / this.mapScale;
      const { clientWidth, clientHeight } = this.element;
      this.element.scrollTo(offsetX * scale - clientWidth / 2, offsetY * scale - clientHeight / 2);
    },
  });
  private readonly seen = svgElement("rect.gp-zoom-seen");
  private mapScale = 1;
  readonly buttons: HTMLElement;
  zoom = 1;
  private picture: SVGSVGElement | null = null;
  private size: Size = { width: 1, height: 1 };

  /** @param fits Which sides of a picture *Fit* shows whole. */
  constructor(private readonly fits: "width" | "both") {
    const button = (name: string, text: string, onclick: () => void) =>
      buttonElement({ "aria-label": name, title: name, onclick }, text);
    this.buttons = element(
      "div.gp-line.gp-tight",
      button("Zoom out", "−", () => this.zoomTo(this.zoom / STEP)),
      button("Zoom in", "+", () => this.zoomTo(this.zoom * STEP)),
      button(fits === "width" ? "Fit to width" : "Fit the picture", "Fit", () => this.fit()),
      this.map,
    );
    new ResizeObserver(() => this.showSeen()).observe(this.element);
  }

  /** Shows a picture, whose size is that at zoom 1, where another one was. */
  show(picture: SVGSVGElement, size: Size): void {
    const { scrollLeft, scrollTop } = this.element;
    this.picture = picture;
    this.size = size;
    this.element.replaceChildren(picture);
    if (this.fits === "width") {
      setAttribute(this.map, "viewBox", `0 0 ${size.width} ${size.height}`);
      this.mapScale = Math.min(MAP.width / size.width, MAP.height / size.height);
      setAttribute(this.map, "width", size.width * this.mapScale);
      setAttribute(this.map, "height", size.height * this.mapScale);
      const nodes = [...picture.querySelectorAll("[role=button] > rect")].map((node) => node.cloneNode());
      replaceChildren(this.map, ...nodes, this.seen);
    }
    this.resize();
    this.element.scrollTo(scrollLeft, scrollTop);
  }

  /** Zooms; what is at a place in the window, by default its middle, stays there. */
  zoomTo(wanted: number, x = this.element.clientWidth / 2, y = this.element.clientHeight / 2): void {
    const { scrollLeft, scrollTop } = this.element;
    const zoom = clamp(wanted, ...ZOOMS);
    const factor = zoom / this.zoom;
    this.zoom = zoom;
    this.resize();
    this.element.scrollTo((scrollLeft + x) * factor - x, (scrollTop + y) * factor - y);
  }

  /** Zooms out until the picture is seen whole; `least` keeps texts readable. */
  fit(least: number = ZOOMS[0]): void {
    const { clientWidth, clientHeight } = this.element;
    const { width, height } = this.size;
    const whole = Math.min(1, clientWidth / width, this.fits === "both" ? clientHeight / height : 1);
    this.zoomTo(Math.max(least, whole));
    this.element.scrollTo(0, 0);
  }

  /** Scrolls to a place of the picture, unless it is seen. */
  reveal(x: number, y: number): void {
    const { clientWidth, clientHeight, scrollLeft, scrollTop } = this.element;
    const [left, top] = [x * this.zoom - scrollLeft, y * this.zoom - scrollTop];
    const isSeen = left > EDGE && left < clientWidth - EDGE && top > EDGE && top < clientHeight - EDGE;
    if (!isSeen) this.element.scrollTo(x * this.zoom - clientWidth / 2, y * this.zoom - clientHeight / 2);
  }

  private resize(): void {
    if (this.picture === null) return;
    setAttribute(this.picture, "width", this.size.width * this.zoom);
    setAttribute(this.picture, "height", this.size.height * this.zoom);
    this.showSeen();
  }

  private showSeen(): void {
    const { clientWidth, clientHeight, scrollLeft, scrollTop, scrollWidth, scrollHeight } = this.element;
    const isWhole = scrollWidth <= clientWidth + 1 && scrollHeight <= clientHeight + 1;
    this.map.toggleAttribute("hidden", this.fits !== "width" || isWhole);
    const seen = { x: scrollLeft, y: scrollTop, width: clientWidth, height: clientHeight };
    for (const [name, value] of Object.entries(seen)) setAttribute(this.seen, name, value / this.zoom);
  }

  private onWheel(event: WheelEvent): void {
    if (!event.ctrlKey) return;
    consume(event);
    const { left, top } = this.element.getBoundingClientRect();
    this.zoomTo(this.zoom * Math.exp(-event.deltaY / 400), event.clientX - left, event.clientY - top);
  }

  /** Drags the picture with the mouse; a touch scrolls it anyway. */
  private onPointerDown(event: PointerEvent): void {
    const isOnButton = (event.target as Element).closest("[role=button], button") !== null;
    if (event.pointerType !== "mouse" || event.button !== 0 || isOnButton || this.isOnScrollBar(event)) return;
    const window = this.element;
    const { scrollLeft, scrollTop } = window;
    const move = ({ clientX, clientY }: PointerEvent) =>
      window.scrollTo(scrollLeft + event.clientX - clientX, scrollTop + event.clientY - clientY);
    const dragging = new AbortController();
    const end = () => {
      dragging.abort();
      window.classList.remove("gp-dragged");
    };
    window.setPointerCapture(event.pointerId);
    window.classList.add("gp-dragged");
    window.addEventListener("pointermove", move, { signal: dragging.signal });
    for (const name of ["pointerup", "pointercancel"]) window.addEventListener(name, end, { signal: dragging.signal });
  }

  private isOnScrollBar({ clientX, clientY }: PointerEvent): boolean {
    const { left, top } = this.element.getBoundingClientRect();
    return clientX - left > this.element.clientWidth || clientY - top > this.element.clientHeight;
  }
}
