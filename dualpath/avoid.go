package dualpath

// An engine whose attempts fail immediately is always idle, so it would be given every next
// request. Without a record of failures, a node with a disconnected cable would get all requests
// and all retries.
//
// A request whose attempt failed therefore avoids both engines of that attempt, because the planner
// cannot determine which engine, or whether the network between them, caused the failure. An engine
// that failed strikesMax times without serving a request in between is avoided by all requests for
// Options.Cooldown. An avoided engine is used only if no other engine takes the request.
//
// If the only engine of a role fails immediately, for example while one process of the engine has
// ended and its leader has not, all attempts of a request could fail at once. So from its second
// failure on a request waits for Options.Cooldown before the next attempt.

// strikesMax is the number of consecutive failures after which an engine is avoided. A single
// failure may have been caused by the other engine of the attempt.
const strikesMax = 2

// byRetry orders requests by retryAt.
func byRetry() ordered[request] {
	return ordered[request]{
		less:  func(a, b *request) bool { return a.retryAt < b.retryAt || (a.retryAt == b.retryAt && a.ID < b.ID) },
		index: func(r *request) *int { return &r.coolingAt },
	}
}

// strike records that an attempt at a request failed on the engine.
func (p *Planner) strike(en *engine) {
	en.strikes++
	if en.strikes >= strikesMax {
		en.avoidUntil = p.now + p.opts.Cooldown
		p.avoidUntil = max(p.avoidUntil, en.avoidUntil)
	}
}

// served records that the engine has completed its part of a request, which clears its strikes.
func (en *engine) served() { en.strikes, en.avoidUntil = 0, 0 }

// avoids reports whether the request avoids en.
func (p *Planner) avoids(r *request, en *engine) bool {
	if r.failures > 0 && (r.avoid[0] == en.id || r.avoid[1] == en.id) {
		return true
	}
	return p.now < en.avoidUntil
}

// mayAvoid reports whether the request may avoid any engine.
func (p *Planner) mayAvoid(r *request) bool { return r.failures > 0 || p.now < p.avoidUntil }

// avoidsAll reports whether the request avoids every engine of the group that could serve it.
func (p *Planner) avoidsAll(r *request, g *group) bool {
	for _, en := range g.engines {
		if !p.avoids(r, en) && p.takes(en, r) {
			return false
		}
	}
	return true
}

// othersTake reports whether another group of g's role has an engine that could serve the request
// and that the request does not avoid. Groups that are changing their role, or whose last Fetch is
// older than Options.Patience, do not count.
func (p *Planner) othersTake(r *request, g *group) bool {
	for _, o := range p.order {
		if o != g && o.role == g.role && !o.switching() && p.now-o.heard <= p.opts.Patience && !p.avoidsAll(r, o) {
			return true
		}
	}
	return false
}
