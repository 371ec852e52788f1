package sessions

import "time"

// ticksPerHeartbeat is the number of rounds of Watch in a heartbeat interval.
const ticksPerHeartbeat = 4

// WatchInterval is the time between two rounds of Watch.
func WatchInterval(heartbeat time.Duration) time.Duration { return heartbeat / ticksPerHeartbeat }

// Rounds returns the number of rounds of Watch that cover d.
func Rounds(d, heartbeat time.Duration) uint64 {
	interval := WatchInterval(heartbeat)
	return uint64((d + interval - 1) / interval)
}

// Watch calls round periodically with the number of the round, until Close begins. Timeouts are
// counted in rounds and not read from a clock. So the time in which this process is suspended or
// gets no CPU does not count towards the timeouts of its peers.
//
// The peers, however, may declare this process dead, because it sends no heartbeats while it does
// not run. So Watch logs a warning if a round is late by half of idle or more.
func (e *Engine[S]) Watch(heartbeat, idle time.Duration, round func(now uint64)) {
	interval := WatchInterval(heartbeat)
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	last := time.Now()
	for {
		select {
		case <-ticker.C:
			now := time.Now()
			if late := now.Sub(last) - interval; late >= idle/2 {
				e.Log.Warn(LogLate, "heartbeats were late: this process got no CPU, or was stopped; a peer ends its session with a silent process (docs/faults.md, Late heartbeats)",
					"late", late.Round(time.Millisecond), "idle_timeout", idle)
			}
			last = now
			round(e.Ticks.Add(1))
		case <-e.Ctx.Done():
			return
		}
	}
}

// Silence holds the counts of one connection at the last round of Watch, and the number of rounds
// since each count changed.
type Silence struct {
	lastRx, lastTx         uint64
	silentTicks, idleTicks uint64
}

// Look must be called once a round. rx and tx are the numbers of receptions and transmissions on
// the connection so far. silent is the number of consecutive rounds in which nothing was received.
// beat reports that a heartbeat is due because nothing was sent.
func (w *Silence) Look(rx, tx uint64) (silent uint64, beat bool) {
	if rx != w.lastRx {
		w.lastRx, w.silentTicks = rx, 0
	} else {
		w.silentTicks++
	}
	if tx != w.lastTx {
		w.lastTx, w.idleTicks = tx, 0
	} else if w.idleTicks++; w.idleTicks >= ticksPerHeartbeat-1 {
		w.idleTicks, beat = 0, true
	}
	return w.silentTicks, beat
}
