package front

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"
)

const (
	// modelsFor is the time for which a list of models is used. A model that is not in the list
	// makes the front request another list at once.
	modelsFor = time.Minute
	// modelsBytes is the largest list that is read.
	modelsBytes = 4 << 20
)

// models is the list of the models that the engines serve. The KV of a LoRA adapter depends on
// weights that the front does not have, so it cannot compute the ids of the blocks: requests for an
// adapter are not planned.
type models struct {
	front *Front

	mu       sync.Mutex
	adapters map[string]bool // by name: whether the model is a LoRA adapter
	until    time.Time       // then the next request renews the list
}

// The reasons for which a completion is not planned, for metrics.
const (
	unplannedAdapter  = "adapter"  // the model is a LoRA adapter
	unplannedUnlisted = "unlisted" // the engines do not list the model: an engine may load an adapter of that name, or refuses it
)

// unplanned returns the reason for which a request is not planned, or "" for a request that is. If no
// engine sends a list of its models, every request is planned. An engine then fails the attempts of a
// request for an adapter.
func (m *models) unplanned(out *http.Request, f fields) string {
	var name string
	if raw := f.get("model"); raw == nil || json.Unmarshal(raw, &name) != nil || name == "" {
		return "" // the engines' default model, or a request that they refuse
	}
	adapter, listed, fresh := m.lookup(name)
	if !listed || !fresh {
		list, err := m.fetch(out)
		switch {
		case err == nil:
			adapter, listed = list[name]
		case out.Context().Err() == nil:
			m.front.metrics.modelsErrors.Inc()
			m.front.opts.Logger.Debug("no engine sent the list of its models", "err", err)
		}
		if err != nil && !listed {
			return ""
		}
	}
	switch {
	case !listed:
		return unplannedUnlisted
	case adapter:
		return unplannedAdapter
	}
	return ""
}

// lookup returns whether a model is a LoRA adapter, if it is in the last list. It returns fresh =
// false to one caller for each modelsFor, which renews the list. If no engine sends a list then, the
// last one stays valid.
func (m *models) lookup(name string) (adapter, listed, fresh bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Now()
	if fresh = !now.After(m.until); !fresh {
		m.until = now.Add(modelsFor)
	}
	adapter, listed = m.adapters[name]
	return adapter, listed, fresh
}

// fetch requests the list from an engine, with the client's headers.
func (m *models) fetch(out *http.Request) (map[string]bool, error) {
	req := out.Clone(out.Context())
	req.Method = http.MethodGet
	req.URL.Path, req.URL.RawPath, req.URL.RawQuery = "/v1/models", "", ""
	req.Header.Del("Content-Type")
	req.Header.Del("Accept-Encoding") // the front decodes the response
	resp, err := m.front.pooled.route(req, &request{})
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	list, err := modelsIn(resp)
	if err != nil {
		return nil, fmt.Errorf("%s: GET /v1/models: %w", resp.Body.(*answer).engine.name, err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.adapters, m.until = list, time.Now().Add(modelsFor)
	return list, nil
}

// modelsIn decodes the response of vLLM's GET /v1/models. The entry of a LoRA adapter has the name of
// its base model as parent.
func modelsIn(resp *http.Response) (map[string]bool, error) {
	if resp.StatusCode != http.StatusOK {
		return nil, errors.New(resp.Status)
	}
	text, err := io.ReadAll(io.LimitReader(resp.Body, modelsBytes+1))
	if err != nil {
		return nil, err
	}
	if len(text) > modelsBytes {
		return nil, fmt.Errorf("the response has more than %d bytes", modelsBytes)
	}
	var got struct {
		Data []struct {
			ID     string  `json:"id"`
			Parent *string `json:"parent"`
		} `json:"data"`
	}
	if err := json.Unmarshal(text, &got); err != nil {
		return nil, fmt.Errorf("the response is invalid: %w", err)
	}
	if len(got.Data) == 0 {
		return nil, errors.New("the response has no models")
	}
	list := make(map[string]bool)
	for _, model := range got.Data {
		list[model.ID] = model.Parent != nil
	}
	return list, nil
}
