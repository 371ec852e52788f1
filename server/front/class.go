package front

import (
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"strconv"
	"time"
	"unicode/utf8"

	"github.com/penstock-kv/penstock/client/gateway"
)

const (
	// priorityField is vLLM's field of a request. Requests with lower values are served earlier.
	priorityField = "priority"
	// maxTenant is the longest name of a tenant, in bytes.
	maxTenant = 256
	// maxFirstToken is the largest time limit for the first token that a request's header may set.
	maxFirstToken = 24 * time.Hour
)

// class sets the fields by which the planner orders requests: tenant, priority, and time limit for
// the first token.
func (r *planned) class(ask *gateway.Request, h http.Header, req *request) (err error) {
	o := &r.front.opts
	if o.TenantHeader != "" {
		if ask.Tenant = h.Get(o.TenantHeader); len(ask.Tenant) > maxTenant {
			return invalid(o.TenantHeader, fmt.Sprintf("the name has %d bytes; the maximum is %d", len(ask.Tenant), maxTenant))
		}
		if !utf8.ValidString(ask.Tenant) {
			return invalid(o.TenantHeader, "the name is not UTF-8")
		}
	}
	if ask.Priority, err = priorityOf(req.fields); err != nil {
		return err
	}
	ask.FirstToken = o.FirstToken
	if o.FirstTokenHeader == "" || h.Get(o.FirstTokenHeader) == "" {
		return nil
	}
	ms, err := strconv.ParseUint(h.Get(o.FirstTokenHeader), 10, 32)
	if err != nil || time.Duration(ms)*time.Millisecond > maxFirstToken {
		return invalid(o.FirstTokenHeader, fmt.Sprintf("it is %.20q; want a whole number of milliseconds from 0 to %d", h.Get(o.FirstTokenHeader), maxFirstToken.Milliseconds()))
	}
	ask.FirstToken = time.Duration(ms) * time.Millisecond
	return nil
}

// priorityOf returns the planner's priority of a request, in which higher values are served
// earlier. Values outside of the range of 32 bits are replaced by the nearest value in it.
func priorityOf(f fields) (int32, error) {
	raw := f.get(priorityField)
	if raw == nil {
		return 0, nil
	}
	var n int64
	if err := json.Unmarshal(raw, &n); err != nil {
		return 0, invalid(priorityField, fmt.Sprintf("it is %.20s; want an integer of 64 bits", raw))
	}
	return int32(-min(max(n, -math.MaxInt32), math.MaxInt32)), nil
}
