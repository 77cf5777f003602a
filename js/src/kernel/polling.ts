/** Asks for the status of a job until it has finished, at increasing intervals. */
import type { JobStatus } from "./protocol";

const FIRST_DELAY = 30;
const LONGEST_DELAY = 300;
/** Of each delay over the one before: a job is seen to have finished after at most a fifth more of its time. */
const GROWTH = 1.2;

/** An `Answer` about a job. */
export interface Reported<J extends JobStatus> {
  result: J;
  buffers: DataView[];
}

export interface Listener<J extends JobStatus> {
  onStatus(reported: Reported<J>): void;
  /** No answer: the kernel is lost, or knows nothing of the job. */
  onError(error: Error): void;
}

function asError(reason: unknown): Error {
  return reason instanceof Error ? reason : new Error(String(reason));
}

/** Follows one job at a time: late answers for an earlier job are ignored. */
export class Poller<J extends JobStatus> {
  private timer: ReturnType<typeof setTimeout> | undefined;
  private round = 0;

  constructor(
    private readonly ask: (id: number) => Promise<Reported<J>>,
    private readonly listener: Listener<J>,
  ) {}

  /** `start`: an answer that is on its way, of whatever makes the job known. */
  follow(start: Promise<Reported<J>>): void {
    this.stop();
    void this.hear(start, this.round, FIRST_DELAY);
  }

  stop(): void {
    clearTimeout(this.timer);
    this.round++;
  }

  private async hear(asked: Promise<Reported<J>>, round: number, delay: number): Promise<void> {
    try {
      const answer = await asked;
      if (round !== this.round) return;
      const { id, state } = answer.result;
      if (state === "running") {
        const again = () => void this.hear(this.ask(id), round, Math.min(GROWTH * delay, LONGEST_DELAY));
        this.timer = setTimeout(again, delay);
      }
      this.listener.onStatus(answer);
    } catch (reason) {
      if (round !== this.round) return;
      this.stop();
      this.listener.onError(asError(reason));
    }
  }
}
