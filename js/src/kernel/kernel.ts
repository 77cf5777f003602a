/** Requests to the kernel, and its state: idle, busy, or lost. */

import { type Answer, type Kernel, type KernelState, Listeners, listen, type Model, RequestFailed } from "../view";
import { DISCONNECTED_MESSAGE, SAVED_MESSAGE, STOPPED_MESSAGE, watchKernel } from "./kernel_status";
import type { LinkedTraits, Reply, Request, RequestError, RequestName, Requests } from "./protocol";

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

  onState(listener: (state: KernelState) => void): () => void {
    return this.listeners.add(listener);
  }

  receive(content: unknown, buffers: unknown): void {
    if (!isReply(content)) return;
    const request = this.pending.get(content.id);
    if (request === undefined) return;
    this.pending.delete(content.id);
    if ("error" in content) request.reject(new RequestFailed(errorOf(content.error)));
    else request.resolve({ result: content.result, buffers: dataViews(buffers) });
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

function isReply(content: unknown): content is Reply {
  if (typeof content !== "object" || content === null) return false;
  const reply = content as Record<string, unknown>;
  return typeof reply.id === "number" && ("result" in reply || "error" in reply);
}

function errorOf(error: unknown): RequestError {
  const { message, field } = (error ?? {}) as Partial<Record<keyof RequestError, unknown>>;
  return {
    message: String(message ?? "the kernel failed without saying why"),
    field: field == null ? null : String(field),
  };
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
