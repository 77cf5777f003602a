/**
 * Notices that the kernel has stopped. Each host signals that differently:
 * - ipywidgets: `comm_live` of the model, its event `comm_live_update`; `comm:close`, `destroy` (the widget was closed);
 * - JupyterLab, Notebook 7: the signals of `widget_manager.context.sessionContext`, for a kernel that died or was shut
 *   down: there `comm_live` stays true;
 * - every host: a `send` that throws, which is seen where it is called.
 */
import { listen, type Model } from "../view";

export const STOPPED_MESSAGE = "The kernel has stopped: run the cell again, after those that create the graph.";
export const CLOSED_MESSAGE = "The kernel has closed this view: run the cell again.";
/** Not a failure: the page was opened without the kernel that made the view. */
export const SAVED_MESSAGE =
  "This is a saved view to browse. Values, patches and runs need the model: run the cell again.";
export const DISCONNECTED_MESSAGE = "The kernel is not connected: reconnect to it, or run the cell again.";

interface KernelListener {
  /** There will be no more replies. `why` says what to do. */
  onLost(why: string): void;
  /** The connection came back. */
  onReconnected(): void;
}

/** The used part of a Lumino signal. */
interface Signal {
  connect(slot: (sender: unknown, argument: unknown) => void): unknown;
  disconnect(slot: (sender: unknown, argument: unknown) => void): unknown;
}

const STOPPED = new Set(["restarting", "autorestarting", "dead", "terminated"]);

/** The used part of a widget's model. */
type WatchedModel = Pick<Model, "on" | "off" | "widget_manager">;

export function watchKernel(
  model: WatchedModel,
  id: string | undefined,
  life: KernelListener,
  onRemove: (undo: () => void) => void,
): void {
  const closed = () => life.onLost(CLOSED_MESSAGE);
  const checkComm = async (why: string) => {
    if ((await isCommLive(model.widget_manager, id)) === false) life.onLost(why);
  };
  const view = { model, onRemove };
  listen(view, "comm_live_update", () => checkComm(STOPPED_MESSAGE));
  listen(view, "comm:close", closed);
  listen(view, "destroy", closed);
  watchSession(model.widget_manager, life, onRemove);
  void checkComm(SAVED_MESSAGE);
}

/** Whether the host's model has a live comm; `undefined` if the host does not know. */
async function isCommLive(host: unknown, id: string | undefined): Promise<unknown> {
  const manager = host as { get_model?(id: string): Promise<unknown> } | undefined;
  if (typeof manager?.get_model !== "function" || !id) return undefined;
  try {
    return property(await manager.get_model(id), "comm_live");
  } catch {
    return undefined;
  }
}

function watchSession(manager: unknown, life: KernelListener, onRemove: (undo: () => void) => void): void {
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
    if (STOPPED.has(String(status))) life.onLost(STOPPED_MESSAGE);
  });
  watch("kernelChanged", (change) => {
    if (property(change, "oldValue")) life.onLost(STOPPED_MESSAGE);
  });
  watch("connectionStatusChanged", (status) => {
    if (status === "disconnected") life.onLost(DISCONNECTED_MESSAGE);
    if (status === "connected") life.onReconnected();
  });
}

function isSignal(thing: unknown): thing is Signal {
  return typeof property(thing, "connect") === "function" && typeof property(thing, "disconnect") === "function";
}

/** `thing[name]` of an unknown value; `undefined` if a getter of the host throws. */
export function property(thing: unknown, name: string): unknown {
  if ((typeof thing !== "object" && typeof thing !== "function") || thing === null) return undefined;
  try {
    return (thing as Record<string, unknown>)[name];
  } catch {
    return undefined;
  }
}
