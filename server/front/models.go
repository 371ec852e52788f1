package front

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
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
	// identityBytes is the largest response to a question about an adapter that is read.
	identityBytes = 64 << 10
)

// models is the list of the models that the engines serve. The KV of a LoRA adapter depends on
// weights that the front does not have. An engine's connector has the adapter's part of the ids of the
// blocks, and the front asks it for that part (identity). The connectors of both engines compare the
// ids of each request with their own, so a wrong part is never a hit.
type models struct {
	front *Front

	mu         sync.Mutex
	adapters   map[string]bool // by name: whether the model is a LoRA adapter
	until      time.Time       // then the next request renews the list
	identities map[string]identity
}

// identity is what the ids of an adapter's blocks are salted with, as the connectors compute it from the
// adapter's files and the engine's options of LoRA. It is empty if an engine cannot identify the
// adapter.
type identity struct {
	salt  string
	until time.Time // then the next request asks an engine again
}

// The reasons for which a completion is not planned, for metrics.
const (
	unplannedAdapter  = "adapter"         // the model is a LoRA adapter that no engine has identified, or that the engines identify differently
	unplannedMedia    = "media"           // the prompt has parts that are not text, and no engine sent their hashes, or the engines have other hashes
	unplannedTokens   = "tokens"          // no engine serves renderPath, and all attempts at the chat with the tokens of /tokenize failed
	unplannedLogprobs = "prompt_logprobs" // the engine computes the whole prompt, for its logprobs
	unplannedBeams    = "beam_search"     // the engine makes a request of its own for each step, and these name no attempt
	unplannedUnlisted = "unlisted"        // the engines do not list the model: an engine may load an adapter of that name, or refuses it
)

// unplanned returns the reason for which a request is not planned, or "" for a request that is. If no
// engine sends a list of its models, every request is planned. An engine then fails the attempts of a
// request for an adapter. salt is the identity of a model that is an adapter.
func (m *models) unplanned(out *http.Request, f fields) (reason, salt string) {
	name := modelOf(f)
	if name == "" {
		return "", ""
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
			return "", ""
		}
	}
	switch {
	case !listed:
		return unplannedUnlisted, ""
	case adapter:
		if salt = m.identity(out, name); salt == "" {
			return unplannedAdapter, ""
		}
	}
	return "", salt
}

// modelOf returns the model that a request names. It is empty for the engines' default model, and for a
// request that they refuse.
func modelOf(f fields) string {
	var name string
	if raw := f.get("model"); raw == nil || json.Unmarshal(raw, &name) != nil {
		return ""
	}
	return name
}

// identity returns the identity of an adapter, or "" if no engine has identified it.
func (m *models) identity(out *http.Request, name string) string {
	m.mu.Lock()
	known := m.identities[name]
	m.mu.Unlock()
	if time.Now().Before(known.until) {
		return known.salt
	}
	salt, err := m.identify(out, name)
	if err != nil {
		if out.Context().Err() == nil {
			m.front.metrics.modelsErrors.Inc()
			m.front.opts.Logger.Debug("no engine identified an adapter", "adapter", name, "err", err)
		}
		return ""
	}
	m.setIdentity(name, identity{salt, time.Now().Add(modelsFor)})
	return salt
}

// setIdentity sets the identity of an adapter of the list.
func (m *models) setIdentity(name string, id identity) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.adapters[name] {
		m.identities[name] = id
	}
}

// identify asks an engine for the identity of an adapter, with the client's headers. The question is a
// completion of one token, because a connector has no other way to answer. If the engine's connector
// cannot identify the adapter, the result is "".
func (m *models) identify(out *http.Request, name string) (string, error) {
	model, _ := json.Marshal(name) // a string can always be encoded
	ask := payload{[]byte(`{"model":`), model, []byte(`,"prompt":[0],"max_tokens":1,"` + transferField + `":{"` + transferKey + `":{"identify":true}}}`)}
	resp, err := m.front.ask(out, http.MethodPost, "/v1/completions", ask)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	var got struct {
		Params struct {
			Penstock struct {
				Adapter string `json:"adapter"`
			} `json:"penstock"`
		} `json:"kv_transfer_params"`
	}
	if err := decode(resp, identityBytes, &got); err != nil {
		return "", fmt.Errorf("%s: the identity of adapter %s: %w", resp.Body.(*answer).engine.name, name, err)
	}
	return got.Params.Penstock.Adapter, nil
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
	resp, err := m.front.ask(out, http.MethodGet, "/v1/models", nil)
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
	if m.identities == nil {
		m.identities = make(map[string]identity)
	}
	maps.DeleteFunc(m.identities, func(name string, _ identity) bool { return !list[name] })
	return list, nil
}

// modelsIn decodes the response of vLLM's GET /v1/models. The entry of a LoRA adapter has the name of
// its base model as parent.
func modelsIn(resp *http.Response) (map[string]bool, error) {
	var got struct {
		Data []struct {
			ID     string  `json:"id"`
			Parent *string `json:"parent"`
		} `json:"data"`
	}
	if err := decode(resp, modelsBytes, &got); err != nil {
		return nil, err
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

// ask sends a question of the gateway's own to an engine and, after a failure, to another engine, with
// the headers of the client's request. body is JSON; nil: none.
func (f *Front) ask(out *http.Request, method, path string, body payload) (*http.Response, error) {
	req := out.Clone(out.Context())
	req.Method = method
	req.URL.Path, req.URL.RawPath, req.URL.RawQuery = path, "", ""
	req.Header.Del("Content-Type")
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	req.Header.Del("Accept-Encoding") // the front decodes the response
	return f.pooled.route(req, &request{body: body})
}

// decode decodes an engine's response with status 200 and JSON of at most maxBytes bytes.
func decode(resp *http.Response, maxBytes int64, into any) error {
	if resp.StatusCode != http.StatusOK {
		return errors.New(resp.Status)
	}
	return decodeBody(resp, maxBytes, into)
}

// decodeBody decodes a response with JSON of at most maxBytes bytes.
func decodeBody(resp *http.Response, maxBytes int64, into any) error {
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxBytes+1))
	if err != nil {
		return err
	}
	if int64(len(text)) > maxBytes {
		return fmt.Errorf("the response has more than %d bytes", maxBytes)
	}
	if err := json.Unmarshal(text, into); err != nil {
		return fmt.Errorf("the response is invalid: %w", err)
	}
	return nil
}
