/**
 * How a front end notices that its kernel has stopped. Each host has other signs:
 * - ipywidgets: `comm_live` of the model, its event `comm_live_update`; `comm:close`, `destroy` (the widget was closed);
 * - JupyterLab, Notebook 7: the signals of `widget_manager.context.sessionContext`, for a kernel that died or was shut
 *   down: there `comm_live` stays true;
 * - every host: a `send` that throws, which is seen where it is called.
 */
import { listen, type Model } from "../view";

export const GONE = "The kernel has stopped: run the cell again, after those that create the graph.";
export const CLOSED = "The kernel has closed this view: run the cell again.";
/** Not a failure: the page was opened without the kernel that made the view, perhaps to stay so. */
export const SAVED = "This is a saved view to browse. Values, patches and runs need the model: run the cell again.";
export const UNCONNECTED = "The kernel is not connected: reconnect to it, or run the cell again.";

interface Life {
  /** Nothing will be answered any more; in words, with what to do. */
  lost(why: string): void;
  /** The connection came back. */
  found(): void;
}

/** A Lumino signal, as far as it is used. */
interface Signal {
  connect(slot: (sender: unknown, argument: unknown) => void): unknown;
  disconnect(slot: (sender: unknown, argument: unknown) => void): unknown;
}

const ENDS = new Set(["restarting", "autorestarting", "dead", "terminated"]);

/** The part of a widget's model that is watched. */
type Watched = Pick<Model, "on" | "off" | "widget_manager">;

export function watchLife(
  model: Watched,
  id: string | undefined,
  life: Life,
  onRemove: (undo: () => void) => void,
): void {
  const closed = () => life.lost(CLOSED);
  const checkComm = async (why: string) => {
    if ((await commLive(model.widget_manager, id)) === false) life.lost(why);
  };
  const view = { model, onRemove };
  listen(view, "comm_live_update", () => checkComm(GONE));
  listen(view, "comm:close", closed);
  listen(view, "destroy", closed);
  watchSession(model.widget_manager, life, onRemove);
  void checkComm(SAVED);
}

/** Whether the model that the host holds has a living comm; `undefined` where the host does not say. */
async function commLive(host: unknown, id: string | undefined): Promise<unknown> {
  const manager = host as { get_model?(id: string): Promise<unknown> } | undefined;
  if (typeof manager?.get_model !== "function" || !id) return undefined;
  try {
    return property(await manager.get_model(id), "comm_live");
  } catch {
    return undefined;
  }
}

function watchSession(manager: unknown, life: Life, onRemove: (undo: () => void) => void): void {
  const session = property(property(manager, "context"), "sessionContext");
  // Consoles and files that mirror outputs have a manager of one kernel, without a session.
  const source = session ?? property(manager, "kernel");
  const watch = (name: string, slot: (argument: unknown) => void) => {
    const signal = property(source, name);
    if (!isSignal(signal)) return;
    const connected = (_sender: unknown, argument: unknown) => slot(argument);
    signal.connect(connected);
    onRemove(() => signal.disconnect(connected));
  };
  watch("statusChanged", (status) => {
    if (ENDS.has(String(status))) life.lost(GONE);
  });
  watch("kernelChanged", (change) => {
    if (property(change, "oldValue")) life.lost(GONE);
  });
  watch("connectionStatusChanged", (status) => {
    if (status === "disconnected") life.lost(UNCONNECTED);
    if (status === "connected") life.found();
  });
}

function isSignal(thing: unknown): thing is Signal {
  return typeof property(thing, "connect") === "function" && typeof property(thing, "disconnect") === "function";
}

/** `thing[name]`, of an unknown value; getters of a host may throw. */
export function property(thing: unknown, name: string): unknown {
  if ((typeof thing !== "object" && typeof thing !== "function") || thing === null) return undefined;
  try {
    return (thing as Record<string, unknown>)[name];
  } catch {
    return undefined;
  }
}
