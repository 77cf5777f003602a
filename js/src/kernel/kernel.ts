/** Requests to the kernel, and its state: idle, busy, or lost. */
import { type Answer, type Kernel, type KernelState, Listeners, listen, type Model, RequestFailed } from "../view";
import type { LinkedTraits, Request, RequestError, RequestName, Requests } from "./protocol";

/** The time without a reply after which the kernel counts as busy. */
export const BUSY_AFTER_MS = 500;
/** The time for a reply to arrive after the kernel has processed the message. */
const REPLY_GRACE_MS = 2000;
const UNANSWERED = "The kernel did not answer, perhaps since it was restarted: run the cell again.";

interface PendingRequest {
  resolve(answer: Answer<RequestName>): void;
  reject(error: RequestFailed): void;
  isQuiet: boolean;
}

/** Returns the kernel of a model; its listeners are removed through `onRemove`. */
export function connect(model: Model<LinkedTraits>, onRemove: (undo: () => void) => void): Kernel {
  const connection = new Connection(model);
  listen({ model, onRemove }, "msg:custom", (content, buffers) => connection.receive(content, buffers));
  onRemove(() => connection.close());
  watchKernel(model, model.get("about")?.model_id, connection, onRemove);
  return connection;
}

class Connection implements Kernel {
  state: KernelState = "idle";
  lostReason = "";
  // Replies reach every view of the model, also in other windows: ids must be unique.
  private lastId = Math.floor(Math.random() * 2 ** 52);
  private readonly pending = new Map<number, PendingRequest>();
  private readonly listeners = new Listeners<KernelState>();
  private readonly graceTimers = new Set<ReturnType<typeof setTimeout>>();
  private busyTimer: ReturnType<typeof setTimeout> | undefined;

  constructor(private readonly model: Model<LinkedTraits>) {}

  get isSaved(): boolean {
    return this.lostReason === SAVED_MESSAGE;
  }

  ask<N extends RequestName>(request: N, payload: Requests[N]["payload"], isQuiet = false): Promise<Answer<N>> {
    return new Promise((resolve, reject) => {
      if (this.state === "lost") {
        reject(failure(this.lostReason));
        return;
      }
      this.lastId += 1;
      const id = this.lastId;
      this.pending.set(id, { resolve: resolve as PendingRequest["resolve"], reject, isQuiet });
      try {
        // marimo calls this when the message is sent; ipywidgets reads the property.
        const callbacks = Object.assign(() => undefined, {
          iopub: { status: (message: unknown) => this.onStatus(id, message) },
        });
        this.model.send({ id, request, payload } satisfies Request<N>, callbacks);
      } catch {
        this.onLost(STOPPED_MESSAGE);
        return;
      }
      if (this.busyTimer === undefined) this.restartBusyTimer();
    });
  }

  onChange(listener: (state: KernelState) => void): () => void {
    return this.listeners.add(listener);
  }

  receive(content: unknown, buffers: unknown): void {
    const { id, result, error } = (content ?? {}) as Partial<{ id: number; result: never; error: RequestError }>;
    const request = this.pending.get(id ?? Number.NaN);
    if (id === undefined || request === undefined || (result === undefined && error === undefined)) return;
    this.pending.delete(id);
    if (error !== undefined) request.reject(new RequestFailed(error));
    else if (result !== undefined) request.resolve({ result, buffers: dataViews(buffers) });
    this.restartBusyTimer();
  }

  onLost(why: string): void {
    // A stopped kernel is also disconnected; a later connection is to a new kernel.
    if (this.state === "lost" && why === DISCONNECTED_MESSAGE) return;
    const isNews = this.state === "lost" && this.lostReason !== why;
    this.lostReason = why;
    clearTimeout(this.busyTimer);
    this.busyTimer = undefined;
    const requests = [...this.pending.values()];
    this.pending.clear();
    if (isNews) this.notify();
    else this.setState("lost");
    for (const request of requests) request.reject(failure(why));
  }

  onReconnected(): void {
    if (this.state === "lost" && this.lostReason === DISCONNECTED_MESSAGE) this.setState("idle");
  }

  close(): void {
    clearTimeout(this.busyTimer);
    for (const grace of this.graceTimers) clearTimeout(grace);
  }

  /** The kernel counts as idle until half a second has passed without a reply. */
  private restartBusyTimer(): void {
    clearTimeout(this.busyTimer);
    this.busyTimer = undefined;
    if (this.state === "lost") return;
    this.setState("idle");
    if ([...this.pending.values()].every((request) => request.isQuiet)) return;
    this.busyTimer = setTimeout(() => this.setState("busy"), BUSY_AFTER_MS);
  }

  /** Hosts of ipywidgets report when the kernel has processed a message. Without a reply soon after, the request is lost. */
  private onStatus(id: number, message: unknown): void {
    const content = (message as { content?: { execution_state?: unknown } } | undefined)?.content;
    if (content?.execution_state !== "idle" || !this.pending.has(id)) return;
    const grace = setTimeout(() => {
      this.graceTimers.delete(grace);
      const request = this.pending.get(id);
      if (request === undefined) return;
      this.pending.delete(id);
      this.restartBusyTimer();
      request.reject(failure(UNANSWERED));
    }, REPLY_GRACE_MS);
    this.graceTimers.add(grace);
  }

  private setState(state: KernelState): void {
    if (this.state === state) return;
    this.state = state;
    this.notify();
  }

  private notify(): void {
    this.listeners.notify(this.state);
  }
}

function failure(message: string): RequestFailed {
  return new RequestFailed({ message, field: null });
}

/** Hosts pass buffers as data views, typed arrays or array buffers. */
function dataViews(buffers: unknown): DataView[] {
  if (!Array.isArray(buffers)) return [];
  return buffers.map((buffer: ArrayBuffer | ArrayBufferView) =>
    ArrayBuffer.isView(buffer)
      ? new DataView(buffer.buffer, buffer.byteOffset, buffer.byteLength)
      : new DataView(buffer),
  );
}

/** The error of a rejected promise, for display. */
export function asRequestError(reason: unknown): RequestError {
  if (reason instanceof RequestFailed) return reason.error;
  return { message: reason instanceof Error ? reason.message : String(reason), field: null };
}

// -- Notices that the kernel has stopped ---------------------------------------------------------------------------------

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

type Slot = (sender: unknown, argument: unknown) => void;

/** The used part of a Lumino signal. */
interface Signal {
  connect(slot: Slot): unknown;
  disconnect(slot: Slot): unknown;
}

const STOPPED = new Set(["restarting", "autorestarting", "dead", "terminated"]);

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
    const signal = property(source, name) as Partial<Signal> | null | undefined;
    const connected: Slot = (_, argument) => slot(argument);
    signal?.connect?.(connected);
    onRemove(() => signal?.disconnect?.(connected));
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

/** `thing[name]` of an unknown value; `undefined` if a getter of the host throws. */
export function property(thing: unknown, name: string): unknown {
  if ((typeof thing !== "object" && typeof thing !== "function") || thing === null) return undefined;
  try {
    return (thing as Record<string, unknown>)[name];
  } catch {
    return undefined;
  }
}
