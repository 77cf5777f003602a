import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import {
  BUSY_AFTER_MS,
  CLOSED_MESSAGE,
  connect,
  DISCONNECTED_MESSAGE,
  SAVED_MESSAGE,
  STOPPED_MESSAGE,
} from "../../src/kernel/kernel";
import { type Kernel, type KernelState, type Model, RequestFailed } from "../../src/view";

interface Sent {
  id: number;
  request: string;
  payload: unknown;
}

class FakeSignal {
  readonly slots = new Set<(sender: unknown, argument: unknown) => void>();
  connect(slot: (sender: unknown, argument: unknown) => void) {
    this.slots.add(slot);
  }
  disconnect(slot: (sender: unknown, argument: unknown) => void) {
    this.slots.delete(slot);
  }
  emit(argument: unknown) {
    for (const slot of this.slots) slot(null, argument);
  }
}

class FakeModel {
  readonly sent: Sent[] = [];
  readonly callbacks: { iopub: { status(message: unknown): void } }[] = [];
  readonly listeners = new Map<string, Set<(...args: unknown[]) => void>>();
  widget_manager: unknown;
  send = (content: unknown, callbacks?: unknown) => {
    this.sent.push(content as Sent);
    this.callbacks.push(callbacks as (typeof this.callbacks)[number]);
  };
  get() {
    return { model_id: "abc" };
  }
  set() {}
  save_changes() {}
  on(event: string, listener: (...args: unknown[]) => void) {
    if (!this.listeners.has(event)) this.listeners.set(event, new Set());
    this.listeners.get(event)?.add(listener);
  }
  off(event: string, listener: (...args: unknown[]) => void) {
    this.listeners.get(event)?.delete(listener);
  }
  trigger(event: string, ...args: unknown[]) {
    for (const listener of this.listeners.get(event) ?? []) listener(...args);
  }
  get listening() {
    return [...this.listeners.values()].reduce((count, set) => count + set.size, 0);
  }
  reply(position: number, rest: object, buffers?: unknown) {
    this.trigger("msg:custom", { id: this.sent.at(position)?.id, ...rest }, buffers);
  }
}

let model: FakeModel;
let undos: (() => void)[];
let states: KernelState[];

function connected(manager?: unknown): Kernel {
  model.widget_manager = manager;
  const kernel = connect(model as unknown as Model, (undo) => undos.push(undo));
  kernel.onChange((state) => states.push(state));
  return kernel;
}

function rejection(promise: Promise<unknown>): Promise<unknown> {
  return promise.then(
    () => expect.unreachable("was answered"),
    (reason) => reason,
  );
}

beforeEach(() => {
  vi.useFakeTimers();
  model = new FakeModel();
  undos = [];
  states = [];
});
afterEach(() => {
  vi.useRealTimers();
});

describe("replies", () => {
  it("are matched to their requests in any order", async () => {
    const kernel = connected();
    const first = kernel.ask("details", { row: 1 });
    const second = kernel.ask("export", { inputs: null });
    expect(model.sent.map(({ request, payload }) => [request, payload])).toEqual([
      ["details", { row: 1 }],
      ["export", { inputs: null }],
    ]);
    model.reply(1, { result: { code: "2" } });
    model.reply(0, { result: { row: 1 } });
    expect((await first).result).toEqual({ row: 1 });
    expect((await second).result).toEqual({ code: "2" });
  });

  it("carry buffers of any kind as data views", async () => {
    const kernel = connected();
    const answer = kernel.ask("run_status", { id: 1 });
    const floats = new Float32Array([0, 1.5, 2]);
    model.reply(0, { result: {} }, [floats.subarray(1, 2), floats.buffer, new DataView(floats.buffer, 8)]);
    const { buffers } = await answer;
    expect(buffers.map((buffer) => buffer.byteLength)).toEqual([4, 12, 4]);
    expect(buffers[0]?.getFloat32(0, true)).toBe(1.5);
  });

  it("with an error reject the request with message and field", async () => {
    const kernel = connected();
    const answer = rejection(kernel.ask("details", { row: 1 }));
    model.reply(0, { error: { message: "too many indices", field: "slice" } });
    const reason = (await answer) as RequestFailed;
    expect(reason).toBeInstanceOf(RequestFailed);
    expect(reason.error).toEqual({ message: "too many indices", field: "slice" });
  });

  it("are ignored if unknown, repeated or malformed", async () => {
    const kernel = connected();
    const answer = kernel.ask("details", { row: 1 });
    for (const content of [null, 3, "x", {}, { id: -1, result: {} }, { id: model.sent[0]?.id }]) {
      model.trigger("msg:custom", content, []);
    }
    model.reply(0, { result: { row: 1 } });
    model.reply(0, { result: { row: 2 } });
    expect((await answer).result).toEqual({ row: 1 });
  });

  it("to another view of the same model are ignored", async () => {
    const one = connected();
    const other = connected();
    const asked = [one.ask("details", { row: 1 }), other.ask("details", { row: 2 })];
    model.reply(1, { result: { row: 2 } });
    model.reply(0, { result: { row: 1 } });
    expect((await Promise.all(asked)).map(({ result }) => result.row)).toEqual([1, 2]);
  });
});

describe("a busy kernel", () => {
  it("is reported after half a second without a reply", async () => {
    const kernel = connected();
    void kernel.ask("details", { row: 1 });
    void kernel.ask("details", { row: 2 });
    vi.advanceTimersByTime(BUSY_AFTER_MS - 1);
    expect(kernel.state).toBe("idle");
    vi.advanceTimersByTime(1);
    expect(states).toEqual(["busy"]);
    model.reply(0, { result: {} });
    expect(kernel.state).toBe("idle");
    vi.advanceTimersByTime(BUSY_AFTER_MS);
    expect(kernel.state).toBe("busy");
    model.reply(1, { result: {} });
    vi.advanceTimersByTime(10 * BUSY_AFTER_MS);
    expect(states).toEqual(["busy", "idle", "busy", "idle"]);
  });
});

describe("a lost kernel", () => {
  const live = { comm_live: true };
  const manager = { get_model: async () => live };
  beforeEach(() => {
    live.comm_live = true;
  });

  async function rejectsAll(kernel: Kernel, open: Promise<unknown>, why: string): Promise<void> {
    expect(((await open) as RequestFailed).error).toEqual({ message: why, field: null });
    expect(kernel.state).toBe("lost");
    expect(kernel.lostReason).toBe(why);
    const sent = model.sent.length;
    expect(((await rejection(kernel.ask("details", { row: 1 }))) as RequestFailed).message).toBe(why);
    expect(model.sent.length).toBe(sent);
  }

  it("is detected from comm_live, and says what to do", async () => {
    const kernel = connected(manager);
    const open = rejection(kernel.ask("details", { row: 1 }));
    model.trigger("comm_live_update");
    await vi.advanceTimersByTimeAsync(0);
    expect(kernel.state).toBe("idle");
    live.comm_live = false;
    model.trigger("comm_live_update");
    await rejectsAll(kernel, open, STOPPED_MESSAGE);
    expect(STOPPED_MESSAGE).toContain("run the cell again");
  });

  it("is detected at once in a notebook reopened without one", async () => {
    live.comm_live = false;
    const kernel = connected(manager);
    const open = rejection(kernel.ask("details", { row: 1 }));
    await vi.advanceTimersByTimeAsync(0);
    await rejectsAll(kernel, open, SAVED_MESSAGE);
    expect(kernel.isSaved).toBe(true);
  });

  it("is not assumed if a host does not report comms, or does not know the model", async () => {
    for (const host of [undefined, {}, { get_model: async () => ({}) }, { get_model: () => Promise.reject("none") }]) {
      const kernel = connected(host);
      await vi.advanceTimersByTimeAsync(0);
      expect(kernel.state).toBe("idle");
    }
  });

  it("is detected from a send that throws", async () => {
    const kernel = connected();
    const open = rejection(kernel.ask("details", { row: 1 }));
    model.send = () => {
      throw new Error("Cannot send");
    };
    const second = rejection(kernel.ask("details", { row: 2 }));
    await rejectsAll(kernel, open, STOPPED_MESSAGE);
    expect(await second).toBeInstanceOf(RequestFailed);
  });

  it.each(["comm:close", "destroy"])("is detected from %s", async (event) => {
    const kernel = connected();
    const open = rejection(kernel.ask("details", { row: 1 }));
    model.trigger(event);
    await rejectsAll(kernel, open, CLOSED_MESSAGE);
  });

  it.each(["restarting", "autorestarting", "dead", "terminated"])("is detected from JupyterLab: %s", async (status) => {
    const sessionContext = { statusChanged: new FakeSignal() };
    const kernel = connected({ ...manager, context: { sessionContext } });
    const open = rejection(kernel.ask("details", { row: 1 }));
    sessionContext.statusChanged.emit("busy");
    expect(kernel.state).toBe("idle");
    sessionContext.statusChanged.emit(status);
    await rejectsAll(kernel, open, STOPPED_MESSAGE);
  });

  it("is detected from a different kernel, not from the first one", async () => {
    const sessionContext = { kernelChanged: new FakeSignal() };
    const kernel = connected({ ...manager, context: { sessionContext } });
    const open = rejection(kernel.ask("details", { row: 1 }));
    sessionContext.kernelChanged.emit({ oldValue: null, newValue: {} });
    expect(kernel.state).toBe("idle");
    sessionContext.kernelChanged.emit({ oldValue: {}, newValue: null });
    await rejectsAll(kernel, open, STOPPED_MESSAGE);
  });

  it("that was only disconnected recovers", async () => {
    const sessionContext = { connectionStatusChanged: new FakeSignal() };
    const kernel = connected({ ...manager, context: { sessionContext } });
    const open = rejection(kernel.ask("details", { row: 1 }));
    sessionContext.connectionStatusChanged.emit("disconnected");
    await rejectsAll(kernel, open, DISCONNECTED_MESSAGE);
    sessionContext.connectionStatusChanged.emit("connected");
    expect(kernel.state).toBe("idle");
    const answer = kernel.ask("details", { row: 1 });
    model.reply(-1, { result: {} });
    await answer;
  });

  it("that was disconnected and then died says so, and does not recover with the connection", () => {
    const sessionContext = { kernelChanged: new FakeSignal(), connectionStatusChanged: new FakeSignal() };
    const kernel = connected({ ...manager, context: { sessionContext } });
    const told: (string | undefined)[] = [];
    kernel.onChange(() => told.push(kernel.lostReason));
    sessionContext.connectionStatusChanged.emit("disconnected");
    sessionContext.kernelChanged.emit({ oldValue: {}, newValue: null });
    sessionContext.connectionStatusChanged.emit("disconnected");
    sessionContext.connectionStatusChanged.emit("connected");
    expect(told).toEqual([DISCONNECTED_MESSAGE, STOPPED_MESSAGE]);
    expect(kernel.state).toBe("lost");
  });

  it("that was restarted does not recover with the connection", () => {
    const sessionContext = { statusChanged: new FakeSignal(), connectionStatusChanged: new FakeSignal() };
    const kernel = connected({ ...manager, context: { sessionContext } });
    sessionContext.statusChanged.emit("restarting");
    sessionContext.connectionStatusChanged.emit("connected");
    expect(kernel.state).toBe("lost");
  });

  it("is not required to reject a request the kernel finished without a reply", async () => {
    const kernel = connected();
    const open = rejection(kernel.ask("details", { row: 1 }));
    const answered = kernel.ask("details", { row: 2 });
    for (const callback of model.callbacks) callback.iopub.status({ content: { execution_state: "idle" } });
    model.reply(1, { result: { row: 2 } });
    await vi.advanceTimersByTimeAsync(5000);
    expect(((await open) as RequestFailed).message).toContain("run the cell again");
    expect((await answered).result.row).toBe(2);
    expect(kernel.state).toBe("idle");
  });
});

it("leaves nothing behind when the view is removed", async () => {
  const sessionContext = { statusChanged: new FakeSignal(), connectionStatusChanged: new FakeSignal() };
  const kernel = connected({ get_model: async () => ({ comm_live: true }), context: { sessionContext } });
  void kernel.ask("details", { row: 1 });
  expect(model.listening).toBeGreaterThan(0);
  for (const undo of undos) undo();
  expect(model.listening).toBe(0);
  expect(sessionContext.statusChanged.slots.size + sessionContext.connectionStatusChanged.slots.size).toBe(0);
  expect(vi.getTimerCount()).toBe(0);
});
