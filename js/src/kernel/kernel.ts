/** Requests to the kernel, and its state: idle, busy, or lost. */

import { type Answer, type Kernel, type KernelState, Listeners, listen, type Model, RequestFailed } from "../view";
import { GONE, SAVED, UNCONNECTED, watchLife } from "./kernel_life";
import type { LinkedTraits, Reply, Request, RequestError, RequestName, Requests } from "./protocol";

/** How long an answer may take before the kernel is considered busy. */
export const PATIENCE_MS = 500;
/** How long a reply may take to arrive after the kernel has processed the message. */
const GRACE_MS = 2000;
const UNANSWERED = "The kernel did not answer, perhaps since it was restarted: run the cell again.";

interface Open {
  resolve(answer: Answer<RequestName>): void;
  reject(error: RequestFailed): void;
  isQuiet: boolean;
}

/** Returns the kernel of a model; its listeners are removed through `onRemove`. */
export function connect(model: Model<LinkedTraits>, onRemove: (undo: () => void) => void): Kernel {
  const connection = new Connection(model);
  listen({ model, onRemove }, "msg:custom", (content, buffers) => connection.receive(content, buffers));
  onRemove(() => connection.close());
  watchLife(model, model.get("about")?.model_id, connection, onRemove);
  return connection;
}

class Connection implements Kernel {
  state: KernelState = "idle";
  why = "";
  // Replies reach every view of the model, also those in other windows: the numbers must be unique.
  private last = Math.floor(Math.random() * 2 ** 52);
  private readonly open = new Map<number, Open>();
  private readonly listeners = new Listeners<KernelState>();
  private readonly graces = new Set<ReturnType<typeof setTimeout>>();
  private patience: ReturnType<typeof setTimeout> | undefined;

  constructor(private readonly model: Model<LinkedTraits>) {}

  get isSaved(): boolean {
    return this.why === SAVED;
  }

  ask<N extends RequestName>(request: N, payload: Requests[N]["payload"], isQuiet = false): Promise<Answer<N>> {
    return new Promise((resolve, reject) => {
      if (this.state === "lost") {
        reject(failed(this.why));
        return;
      }
      this.last += 1;
      const id = this.last;
      this.open.set(id, { resolve: resolve as Open["resolve"], reject, isQuiet });
      try {
        // marimo calls this when the message is sent; ipywidgets reads the property.
        const callbacks = Object.assign(() => undefined, {
          iopub: { status: (message: unknown) => this.heard(id, message) },
        });
        this.model.send({ id, request, payload } satisfies Request<N>, callbacks);
      } catch {
        this.lost(GONE);
        return;
      }
      if (this.patience === undefined) this.wait();
    });
  }

  onState(listener: (state: KernelState) => void): () => void {
    return this.listeners.add(listener);
  }

  receive(content: unknown, buffers: unknown): void {
    if (!isReply(content)) return;
    const request = this.open.get(content.id);
    if (request === undefined) return;
    this.open.delete(content.id);
    if ("error" in content) request.reject(new RequestFailed(errorOf(content.error)));
    else request.resolve({ result: content.result, buffers: views(buffers) });
    this.wait();
  }

  lost(why: string): void {
    // A kernel that has stopped is disconnected, too: a later connection is to a new kernel.
    if (this.state === "lost" && why === UNCONNECTED) return;
    const isNews = this.state === "lost" && this.why !== why;
    this.why = why;
    clearTimeout(this.patience);
    this.patience = undefined;
    const requests = [...this.open.values()];
    this.open.clear();
    if (isNews) this.tell();
    else this.become("lost");
    for (const request of requests) request.reject(failed(why));
  }

  found(): void {
    if (this.state === "lost" && this.why === UNCONNECTED) this.become("idle");
  }

  close(): void {
    clearTimeout(this.patience);
    for (const grace of this.graces) clearTimeout(grace);
  }

  /** The kernel is idle until half a second has passed without any answer. */
  private wait(): void {
    clearTimeout(this.patience);
    this.patience = undefined;
    if (this.state === "lost") return;
    this.become("idle");
    if ([...this.open.values()].every((request) => request.isQuiet)) return;
    this.patience = setTimeout(() => this.become("busy"), PATIENCE_MS);
  }

  /** Hosts of ipywidgets report when the kernel has processed a message. Without a reply by then, it was lost. */
  private heard(id: number, message: unknown): void {
    const content = (message as { content?: { execution_state?: unknown } } | undefined)?.content;
    if (content?.execution_state !== "idle" || !this.open.has(id)) return;
    const grace = setTimeout(() => {
      this.graces.delete(grace);
      const request = this.open.get(id);
      if (request === undefined) return;
      this.open.delete(id);
      this.wait();
      request.reject(failed(UNANSWERED));
    }, GRACE_MS);
    this.graces.add(grace);
  }

  private become(state: KernelState): void {
    if (this.state === state) return;
    this.state = state;
    this.tell();
  }

  private tell(): void {
    this.listeners.notify(this.state);
  }
}

function failed(message: string): RequestFailed {
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

/** Hosts hand over binary parts as views, as arrays of bytes or as bare buffers. */
function views(buffers: unknown): DataView[] {
  if (!Array.isArray(buffers)) return [];
  return buffers.map((buffer: ArrayBuffer | ArrayBufferView) =>
    ArrayBuffer.isView(buffer)
      ? new DataView(buffer.buffer, buffer.byteOffset, buffer.byteLength)
      : new DataView(buffer),
  );
}

/** The reason of a rejected promise, for display. */
export function wordsOf(reason: unknown): RequestError {
  if (reason instanceof RequestFailed) return reason.error;
  return { message: reason instanceof Error ? reason.message : String(reason), field: null };
}
